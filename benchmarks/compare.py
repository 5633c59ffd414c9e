"""One workload, eager and Encore in its eager lowering, measured fairly.

Both sides are built from the same seed and fed the same batch in the same process. Steps are timed in turns, and the
side that goes first changes every round: a machine that slows down slows both, so the ratio of a round holds where
seconds do not. Peaks come from the allocator, not from the prediction.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import encore
from benchmarks.workloads import Workload
from encore.api import compiled_call
from encore.cost import Measurement
from encore.schedule import simulate
from encore.terminal import Advance

WARM_UP = 2
SEED = 0


@dataclass(frozen=True, slots=True)
class Trainee:
    """A model and the batch it is measured on. Its step is forward and backward; old gradients are dropped before."""

    model: nn.Module
    batch: tuple[torch.Tensor, ...]

    def step(self) -> None:
        self.model(*self.batch).backward()

    def timed(self) -> float:
        """Seconds of one step."""
        self.model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def measured(self) -> Measurement:
        """The allocator's word on one step, from a fixed random state."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        return encore.measure(self.step)


@dataclass(frozen=True, slots=True)
class Turns:
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


def in_turns(first: Callable[[], float], second: Callable[[], float], rounds: int) -> Turns:
    """Time both sides `rounds` times; the one that begins changes every round."""
    pairs = []
    for number in range(rounds):
        if number % 2 == 0:
            one = first()
            pairs.append((one, second()))
        else:
            other = second()
            pairs.append((first(), other))
    return Turns(tuple(pairs))


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


def compare(build: Callable[[], Workload], *, rounds: int, tell: Advance = lambda note: None) -> Comparison:
    """Measure one workload; `tell` is called after each of its `stages`."""
    workload = build()
    eager = Trainee(workload.model, workload.batch(0))
    planned = Trainee(encore.compile(build().model, lowering="eager", overhead=0.0), eager.batch)
    torch.manual_seed(SEED)
    first_step_seconds = planned.timed()
    tell("first step through Encore")
    for _ in range(WARM_UP):
        eager.timed()
        planned.timed()
    tell("warm-up")
    turns = in_turns(eager.timed, planned.timed, rounds)
    tell("rounds in turns")
    eager_peak = eager.measured().step_peak
    encore_peak = planned.measured().step_peak
    tell("peaks")
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
        eager_seconds=turns.seconds[0],
        encore_seconds=turns.seconds[1],
        ratio=turns.ratio,
        lowest_ratio=turns.spread[0],
        highest_ratio=turns.spread[1],
        rounds=rounds,
        first_step_seconds=first_step_seconds,
        capture_seconds=capture_seconds,
        plan_seconds=sum(seconds.get(stage, 0.0) for seconds in stages for stage in planning),
        simulator_seconds=simulator_seconds(planned.model),
        gradient_difference=gradient_difference(eager.model, planned.model),
    )


STAGES = 4
"""How often `compare` tells."""


def simulator_seconds(model: nn.Module) -> float:
    """One simulation of every schedule of the last step; workspaces are known by then."""
    session = compiled_call(model).session
    started = time.perf_counter()
    for captured in session.last_step:
        simulate(captured.plan.schedule, session.workspaces)
    return time.perf_counter() - started


def times_in_turns(
    trainees: Mapping[str, Trainee],
    rounds: int,
    tell: Advance = lambda note: None,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[float]]:
    """Step times of several systems, the order turning round by round. A system that raises something goes to `failed`,
    where there is one, and has no times."""
    order = list(trainees)
    seconds: dict[str, list[float]] = {system: [] for system in order}
    for number in range(rounds):
        for system in order[number % len(order) :] + order[: number % len(order)]:
            if system not in seconds:
                continue
            try:
                seconds[system].append(trainees[system].timed())
            except Exception as error:
                if failed is None:
                    raise
                failed(system, error)
                del seconds[system]
        tell("rounds in turns")
    return seconds


def median_ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    """One system's time over another's: the median of the rounds."""
    return statistics.median(one / other for one, other in zip(mine, others, strict=True))


def ratio_spread(mine: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest round of `median_ratio`."""
    ratios = [one / other for one, other in zip(mine, others, strict=True)]
    return min(ratios), max(ratios)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those of the last step, in double precision."""
    return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]


def relative_distance(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """How far all tensors together are from others, relative to the size of those; infinite where one holds a NaN."""
    apart = sum(float((one - other).square().sum()) for one, other in zip(found, truth, strict=True))
    distance = float((apart / sum(float(other.square().sum()) for other in truth)) ** 0.5)
    return math.inf if math.isnan(distance) else distance


def largest_difference(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference of any two elements; infinite where one is a NaN, which no `max` would tell."""
    return max((_distance(one, other) for one, other in zip(ones, others, strict=True)), default=0.0)


def gradient_difference(expected: nn.Module, found: nn.Module) -> float:
    """Largest absolute difference of gradients; infinite where only one side has a gradient, or a NaN."""
    pairs: Sequence[tuple[nn.Parameter, nn.Parameter]] = list(
        zip(expected.parameters(), found.parameters(), strict=True)
    )
    return max((_distance(one.grad, other.grad) for one, other in pairs), default=0.0)


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return float((one - other).abs().nan_to_num(nan=float("inf")).max())
