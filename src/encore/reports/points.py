"""Plans and measurements as points of one chart: bytes against time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from encore.errors import OptionError

Curve = tuple[tuple[int, float], ...]
"""(resident + step_peak in bytes, overhead), fastest first."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step, of this model or of another system: `Point("eager", 1.02, 3_500_000_000)`."""

    name: str
    seconds_ratio: float
    """Seconds of its step over those of this model with everything kept (`overhead=0`), which is 1 on the chart."""
    step_peak: int
    """Bytes alive at its peak: `encore.measure(step).step_peak`."""

    def __post_init__(self) -> None:
        number = isinstance(self.seconds_ratio, int | float) and math.isfinite(self.seconds_ratio)
        if not number or self.seconds_ratio <= 0:
            raise OptionError(
                f"seconds_ratio={self.seconds_ratio!r} is not accepted; give a positive number, such as 1.1"
            )
        if not isinstance(self.step_peak, int) or isinstance(self.step_peak, bool) or self.step_peak < 0:
            raise OptionError(f"step_peak={self.step_peak!r} is not accepted; give bytes, at least 0")


def best(points: Iterable[tuple[int, float]]) -> Curve:
    """Those that no other point beats in both bytes and time."""
    found: list[tuple[int, float]] = []
    for total, overhead in sorted(points, key=lambda point: (point[1], point[0])):
        if not found or total < found[-1][0]:
            found.append((total, overhead))
    return tuple(found)
