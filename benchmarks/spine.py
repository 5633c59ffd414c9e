"""The suite `spine`: eager PyTorch and Encore's eager lowering on one workload after another.

Both sides are built from the same seed and get the same batch in the same process. Steps are timed in interleaved
rounds, peaks come from the allocator, not from the prediction.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import encore
from benchmarks.differences import gradient_difference
from benchmarks.pairs import paired_times
from benchmarks.schema import Layout, Written
from benchmarks.workloads import TINY_SIZES, Workload, build
from encore.api import compiled_call
from encore.compare.contest import WARM_UP
from encore.compare.trainee import SEED, Trainee
from encore.machine import Machine, this_machine
from encore.schedule import simulate
from encore.terminal import Advance, progress

WORKLOADS = ("nmt", "transformer", "resnet", "speech")
ROUNDS, QUICK_ROUNDS = 9, 7


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found out about one workload. Bytes and seconds."""

    workload: str
    operators: int
    """Of the joint graph: forward and backward."""
    graphs: int
    """One, unless the model breaks."""
    plain: tuple[str, ...]
    """Parts that run as plain PyTorch."""
    resident: int
    eager_peak: int
    encore_peak: int
    predicted_peak: int
    eager_seconds: float
    encore_seconds: float
    ratio: float
    """Encore's step time over eager's: the median of the rounds."""
    lowest_ratio: float
    highest_ratio: float
    rounds: int
    first_step_seconds: float
    """The first step through Encore, everything included."""
    capture_seconds: float
    """AOTAutograd's trace of the joint graph."""
    plan_seconds: float
    """Facts, verifier, plan (first-time probing of operators included) and lowering."""
    simulator_seconds: float
    gradient_difference: float
    """Largest absolute difference between the two sides' gradients of one step; 0.0 means every bit."""

    @property
    def prediction_error(self) -> float:
        """How far the prediction is above the measured peak, as a fraction of it; negative if below."""
        return self.predicted_peak / self.encore_peak - 1


def compare_workload(build: Callable[[], Workload], *, rounds: int, advance: Advance = lambda note: None) -> Comparison:
    """Measure one workload; `advance` is called after each of its `STAGES`."""
    workload = build()
    eager = Trainee(workload.model, workload.batch(0))
    planned = Trainee(encore.compile(build().model, lowering="eager", overhead=0.0), eager.args)
    torch.manual_seed(SEED)
    first_step_seconds = planned.timed()
    advance("first step through Encore")
    for _ in range(WARM_UP):
        eager.timed()
        planned.timed()
    advance("warm-up")
    times = paired_times(eager.timed, planned.timed, rounds)
    advance("interleaved rounds")
    eager_peak = eager.measured().step_peak
    encore_peak = planned.measured().step_peak
    advance("peaks")
    report = encore.report(planned.model)
    stages = [graph.seconds for graph in report.graphs]
    capture_seconds = sum(seconds.get("capture", 0.0) + seconds.get("capture of repeats", 0.0) for seconds in stages)
    planning = ("facts", "verify", "plan", "compile", "lower")
    return Comparison(
        workload=workload.name,
        operators=sum(graph.operators for graph in report.graphs),
        graphs=len(report.graphs),
        plain=report.plain,
        resident=report.resident,
        eager_peak=eager_peak,
        encore_peak=encore_peak,
        predicted_peak=report.planned.step_peak,
        eager_seconds=times.seconds[0],
        encore_seconds=times.seconds[1],
        ratio=times.ratio,
        lowest_ratio=times.spread[0],
        highest_ratio=times.spread[1],
        rounds=rounds,
        first_step_seconds=first_step_seconds,
        capture_seconds=capture_seconds,
        plan_seconds=sum(seconds.get(stage, 0.0) for seconds in stages for stage in planning),
        simulator_seconds=simulator_seconds(planned.model),
        gradient_difference=gradient_difference(eager.model, planned.model),
    )


STAGES = 4
"""How often `compare_workload` reports progress."""


def simulator_seconds(model: nn.Module) -> float:
    """One simulation of every schedule of the last step; workspaces are known by then."""
    session = compiled_call(model).session
    started = time.perf_counter()
    for captured in session.last_step:
        simulate(captured.plan.schedule, session.workspaces)
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class SpineSuite(Written):
    """One run of the suite."""

    layout = Layout("encore_bench", 3)

    machine: Machine
    quick: bool
    """Tiny sizes: a check that everything works. Its times say little."""
    comparisons: tuple[Comparison, ...]
    seconds: float = 0.0
    """The run took so long."""


def run_spine(*, quick: bool = False) -> SpineSuite:
    """Compare every workload of the suite, reporting progress on stderr."""
    comparisons = []
    for name in WORKLOADS:
        make = functools.partial(build, name, **(TINY_SIZES[name] if quick else {}))
        with progress(f"{name:<11}", STAGES) as advance:
            comparisons.append(compare_workload(make, rounds=QUICK_ROUNDS if quick else ROUNDS, advance=advance))
        torch.compiler.reset()  # the next workload starts without this one's graphs
        gc.collect()
    return SpineSuite(this_machine(), quick, tuple(comparisons))
