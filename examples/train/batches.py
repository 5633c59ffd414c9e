"""`--largest-batch`: how large a batch a budget holds, in plain PyTorch and through Encore, and what that buys.

Both sizes come from estimates; then both sides train a few interleaved steps. Plain PyTorch does not run Encore's
schedule with everything kept, which is what an estimate knows: its autograd holds a little more, or less. So that side
is measured, the prediction corrected by what was found, and the search done again.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pairs import PairedTimes, paired_times
from encore.batch_size import largest_within
from encore.errors import BudgetError, OptionError
from encore.options import parse_budget
from encore.terminal import notes
from encore.units import bytes_text, seconds_text
from examples.train.search import Estimates
from examples.train.settings import Settings, Size
from examples.train.state import Training

ROUNDS = 5
"""Steps of either side that are timed."""
ATTEMPTS = 4
"""How often plain PyTorch is measured at most."""


@dataclass(frozen=True, slots=True)
class Side:
    """One way of training, at the largest batch that it fits. Bytes are resident and step together."""

    batch_size: int
    predicted: int
    measured: int
    step_seconds: float

    @property
    def examples_per_second(self) -> float:
        return self.batch_size / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "examples_per_second": self.examples_per_second}

    def cells(self) -> tuple[str, ...]:
        sizes = bytes_text(self.predicted), bytes_text(self.measured)
        return str(self.batch_size), *sizes, seconds_text(self.step_seconds), f"{self.examples_per_second:.4g}"


COLUMNS = ("largest batch", "predicted", "measured", "a step", "examples/s")


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """What a budget holds."""

    workload: str
    sizes: Mapping[str, Size]
    budget: int
    plain: Side | None
    """None where not even a batch of one fits."""
    planned: Side
    times: PairedTimes | None = field(repr=False)
    """Seconds of plain PyTorch and of Encore, where both ran."""

    @property
    def speedups(self) -> list[float]:
        """Encore's examples a second over plain PyTorch's, round by round, sorted."""
        if self.plain is None or self.times is None:
            return []
        larger = self.planned.batch_size / self.plain.batch_size
        return sorted(larger / ratio for ratio in self.times.ratios)

    @property
    def speedup(self) -> float | None:
        """The median of the rounds."""
        return statistics.median(self.speedups) if self.speedups else None

    def to_json(self) -> str:
        """The numbers as JSON; `encore_largest_batch` is the version of its layout."""
        told = {
            "encore_largest_batch": 1,
            "workload": self.workload,
            "sizes": dict(self.sizes),
            "budget": self.budget,
            "plain": None if self.plain is None else self.plain.to_dict(),
            "planned": self.planned.to_dict(),
            "speedup": self.speedup,
        }
        return json.dumps(told, indent=2)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items() if size is not None)
        plain = ("none", *[""] * (len(COLUMNS) - 1)) if self.plain is None else self.plain.cells()
        rows = {"": COLUMNS, "plain PyTorch": plain, "Encore": self.planned.cells()}
        return "\n".join(
            [
                f"{self.workload} ({sizes}) within {bytes_text(self.budget)}: "
                "parameters, buffers, inputs, Adam's state, and a step",
                "",
                *(f"  {name:<13}" + "".join(f"{cell:>14}" for cell in row).rstrip() for name, row in rows.items()),
                "",
                f"  {self._verdict()}",
            ]
        )

    def _verdict(self) -> str:
        if self.plain is None:
            return "plain PyTorch fits no batch at all"
        larger, speedups = self.planned.batch_size / self.plain.batch_size, self.speedups
        return (
            f"Encore trains {larger:.2f}x the batch at {self.speedup:.2f}x the examples a second "
            f"(median of {len(speedups)} interleaved rounds; {speedups[0]:.2f} to {speedups[-1]:.2f})"
        )


@dataclass(frozen=True, slots=True)
class _Trial:
    """A training at one batch size that has compiled and been measured."""

    training: Training
    measured: int
    """Bytes of a step's peak."""

    @property
    def batch_size(self) -> int:
        return self.training.settings.batch_size

    def seconds(self) -> float:
        return self.training.step().seconds


def largest_batch(settings: Settings) -> LargestBatch:
    """Search, then train a few steps at what was found. Raises `BudgetError` where Encore fits no batch either."""
    limit = _limit(settings)
    with notes(f"{settings.workload} within {bytes_text(limit)}") as tell:
        estimates = Estimates(settings, tell)
        planned = _planned(settings, limit, estimates)
        plain = _plain(settings, limit, estimates)
        tell("interleaved rounds")
        if plain is None:
            times, seconds = None, (0.0, statistics.median(planned.seconds() for _ in range(ROUNDS)))
        else:
            times = paired_times(plain.seconds, planned.seconds, ROUNDS)
            seconds = times.seconds

    def side(trial: _Trial, peak: int, seconds: float) -> Side:
        resident = estimates.resident(trial.batch_size)
        return Side(trial.batch_size, resident + peak, resident + trial.measured, seconds)

    return LargestBatch(
        workload=settings.workload,
        sizes={name: size for name, size in settings.all_sizes.items() if name != "batch_size"},
        budget=limit,
        plain=None if plain is None else side(plain, estimates.unplanned(plain.batch_size), seconds[0]),
        planned=side(planned, planned.training.report().planned.step_peak, seconds[1]),
        times=times,
    )


def _limit(settings: Settings) -> int:
    if settings.budget is None:
        raise OptionError("--largest-batch looks for what a budget holds; give --budget, such as 2GiB")
    limit = parse_budget(settings.budget).bytes
    if limit is None:
        raise OptionError(
            f"--largest-batch wants a budget in bytes, such as 2GiB: {settings.budget!r} is another for every batch"
        )
    return limit


def _planned(settings: Settings, limit: int, estimates: Estimates) -> _Trial:
    """Encore at its largest batch. An estimate knows bounds where the first step measures; should it have promised too
    much, the next smaller size gets its turn."""
    size = largest_within(limit, estimates.floor)
    while True:
        if size == 0:
            estimates.at(1).plan(limit)  # tells what stands in the way
        try:
            return _trial(settings, size)
        except BudgetError:
            size = largest_within(limit, estimates.floor, most=size - 1)


def _plain(settings: Settings, limit: int, estimates: Estimates) -> _Trial | None:
    """Plain PyTorch at the largest batch that was measured to fit."""
    eager = dataclasses.replace(settings, budget=None, overhead=None, lowering=None, tiers=None, eager=True)
    trials: dict[int, _Trial] = {}
    correction = 1.0
    for _ in range(ATTEMPTS):

        def total(size: int, correction: float = correction) -> float:
            return estimates.resident(size) + correction * estimates.unplanned(size)

        size = largest_within(limit, total)
        if size == 0 or size in trials:
            break
        trials[size] = _trial(eager, size)
        correction = trials[size].measured / estimates.unplanned(size)
    fitting = [size for size, trial in trials.items() if estimates.resident(size) + trial.measured <= limit]
    return trials[max(fitting)] if fitting else None


def _trial(settings: Settings, batch_size: int) -> _Trial:
    """Two steps: one that compiles, one that is measured."""
    training = Training(dataclasses.replace(settings, sizes={**settings.sizes, "batch_size": batch_size}))
    training.step()
    peak = training.step(measured=True).peak
    assert peak is not None
    return _Trial(training, peak)
