"""Activations on disk, the second part of the suite `bptt`: how long a step waits, as predicted and as measured.

Each network runs in the eager lowering, whose gradients are PyTorch's bit for bit, in four ways: as it is; recomputing
alone, at the lowest peak it can reach; every method with a disk, too, within that same peak; and a disk alone,
at its own lowest peak, where most bytes move and there is most to wait for. How fast the disk is next to such steps is
learnt from a few of them first (`cost/lessons.py`), by a model that is then thrown away: what is predicted was said by
a planner that had seen steps on this disk, not these.

**Stall, predicted**: in the model of `schedule/transfers.py`, the seconds that all `Wait` actions of the step wait.
**Stall, measured**: the seconds for which the step's thread stood in the tier, waiting for bytes, by the tier's clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import encore
from benchmarks.differences import largest_difference
from benchmarks.workloads import build, tiny
from encore.compare.trainee import SEED, Trainee
from encore.cost.lessons import STEPS

WORKLOADS: dict[str, dict[str, int]] = {"resnet": {"batch_size": 8}, "speech": {}}
ROUNDS, QUICK_ROUNDS = 5, 1
KEPT, RECOMPUTED, DISK_TOO, DISK_ALONE = "as it is", "recomputing", "with a disk", "a disk alone"
OPTIONS: dict[str, dict[str, Any]] = {
    KEPT: {"overhead": 0.0, "methods": "recompute"},
    RECOMPUTED: {"budget": "min", "methods": "recompute"},
    DISK_TOO: {"tiers": "disk"},
    DISK_ALONE: {"budget": "min", "methods": "stash", "tiers": "disk"},  # there is nothing to stash in these graphs
}


@dataclass(frozen=True, slots=True)
class OffloadRow:
    """One network in one way. Bytes and seconds of a step; seconds are medians of the rounds."""

    workload: str
    system: str
    predicted_peak: int
    peak: int
    predicted_seconds: float
    """0 where no plan was looked for."""
    seconds: float
    moved: int
    predicted_stall: float
    stall: float
    gradient_difference: float
    """The largest, from eager PyTorch's; 0.0 means every bit."""
    rounds: int


def offload_rows(*, quick: bool, advance: Callable[[str], None]) -> list[OffloadRow]:
    """All networks in all ways, interleaved."""
    return [row for name in WORKLOADS for row in _one_network(name, quick, advance)]


def _one_network(name: str, quick: bool, advance: Callable[[str], None]) -> list[OffloadRow]:
    def workload() -> Any:
        return tiny(name) if quick else build(name, **WORKLOADS[name])

    eager = Trainee(workload().model, workload().batch(0))
    expected = _gradients(eager)
    trainees: dict[str, Trainee] = {}
    floor = 0
    for system, options in OPTIONS.items():
        asked = {"budget": floor, **options} if system == DISK_TOO else options
        if "tiers" in asked:
            scout = Trainee(encore.compile(workload().model, lowering="eager", **asked), eager.args)
            for _ in range(STEPS + 1):
                scout.timed()
        trainees[system] = Trainee(encore.compile(workload().model, lowering="eager", **asked), eager.args)
        trainees[system].timed()
        if system == RECOMPUTED:
            report = encore.report(trainees[system].model)
            floor = report.resident + report.planned.step_peak
        advance(f"{name}, {system}: planned")
    rounds = QUICK_ROUNDS if quick else ROUNDS
    seconds: dict[str, list[float]] = {system: [] for system in trainees}
    stalls: dict[str, list[float]] = {system: [] for system in trainees}
    for turn in range(rounds):
        for system in trainees if turn % 2 == 0 else reversed(trainees):
            seconds[system].append(trainees[system].timed())
            stalls[system].append(encore.report(trainees[system].model).stalled or 0.0)
    rows = []
    for system, trainee in trainees.items():
        planned = encore.report(trainee.model).planned
        rows.append(
            OffloadRow(
                name, system, planned.step_peak, trainee.measured().step_peak, planned.seconds,
                statistics.median(seconds[system]), planned.moved, planned.stall, statistics.median(stalls[system]),
                largest_difference(_gradients(trainee), expected), rounds,
            )
        )  # fmt: skip
    advance(f"{name}: measured")
    return rows


def _gradients(trainee: Trainee) -> list[torch.Tensor]:
    """Of one step from a fixed random state."""
    trainee.model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    trainee.step()
    return [parameter.grad.clone() for parameter in trainee.model.parameters() if parameter.grad is not None]
