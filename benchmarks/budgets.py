"""The suite `plan`, first part: ten budgets from the floor to the unplanned peak, and what came of each."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

import encore
from benchmarks.workloads import Workload, build
from encore.compare.trainee import Trainee, interleaved_times, median_ratio, ratio_spread, relative_distance
from encore.terminal import progress

BUDGETS = 10


@dataclass(frozen=True, slots=True)
class BudgetOutcome:
    """One workload under one budget. Bytes, and ratios to the same model with everything kept."""

    budget: int
    """For what the step allocates: without the resident bytes, which no plan changes."""
    predicted: int
    measured: int
    predicted_overhead: float
    against_kept: float
    """Step time over that of the plan that keeps everything: the median of the rounds."""
    spread: tuple[float, float]
    """Its lowest and highest round."""
    gradient_difference: float
    """Distance of all gradients from those of the plan that keeps everything, relative to their size."""

    @property
    def kept(self) -> bool:
        return self.measured <= self.budget


def sweep(name: str, sizes: dict[str, int], *, rounds: int) -> tuple[BudgetOutcome, ...]:
    """Ten budgets on one workload, reporting progress on stderr."""
    make = functools.partial(build, name, **sizes)
    with progress(f"{name:<11}", BUDGETS + 1) as advance:
        return _sweep(make, rounds, advance)


def _sweep(make: Callable[[], Workload], rounds: int, advance: Callable[[str], None]) -> tuple[BudgetOutcome, ...]:
    batch = make().batch(0)
    kept = Trainee(encore.compile(make().model, overhead=0.0), batch)
    smallest = Trainee(encore.compile(make().model, budget="min"), batch)
    kept.timed()
    smallest.timed()
    kept.measured()
    truth = kept.gradients()
    resident = encore.report(kept.model).resident
    floor, highest = (encore.report(side.model).planned.step_peak for side in (smallest, kept))
    advance("floor and unplanned peak")
    found = []
    for number in range(BUDGETS):
        budget = round(floor + (highest - floor) * number / (BUDGETS - 1))
        planned = Trainee(encore.compile(make().model, budget=resident + budget), batch)
        planned.timed()
        seconds = interleaved_times({"kept": kept.timed, "planned": planned.timed}, rounds)
        measured = planned.measured().step_peak
        report = encore.report(planned.model)
        found.append(
            BudgetOutcome(
                budget=budget,
                predicted=report.planned.step_peak,
                measured=measured,
                predicted_overhead=report.planned.overhead,
                against_kept=median_ratio(seconds["planned"], seconds["kept"]),
                spread=ratio_spread(seconds["planned"], seconds["kept"]),
                gradient_difference=relative_distance(planned.gradients(), truth),
            )
        )
        advance(f"budget {number + 1}")
        torch.compiler.reset()
        gc.collect()
    return tuple(found)
