"""Two sides, timed in interleaved rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from encore.compare.trainee import interleaved_times


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """Seconds of two sides, round by round."""

    pairs: tuple[tuple[float, float], ...]

    @property
    def ratios(self) -> list[float]:
        """The second side's time over the first's, sorted."""
        return sorted(second / first for first, second in self.pairs)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest ratio of a round."""
        return self.ratios[0], self.ratios[-1]

    @property
    def seconds(self) -> tuple[float, float]:
        """Median seconds of either side."""
        first, second = zip(*self.pairs, strict=True)
        return statistics.median(first), statistics.median(second)


def paired_times(first: Callable[[], float], second: Callable[[], float], rounds: int) -> PairedTimes:
    """Time both sides `rounds` times; the one that begins changes every round."""
    seconds = interleaved_times({"first": first, "second": second}, rounds)
    return PairedTimes(tuple(zip(seconds["first"], seconds["second"], strict=True)))
