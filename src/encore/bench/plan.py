"""The suite `plan`: how much memory recomputation saves, and at which price, beside what people would use instead.

In one process for each workload, in turns, on the same seed and batch: eager; `torch.utils.checkpoint` around each
block; `torch.compile` with `activation_memory_budget` at several settings; Encore at its default, as small as eager's
time allows, at the peak of the checkpointed model, and at its floor. A peer that fails is shown with its error.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint

import encore
from encore.bench.compare import WARM_UP, Trainee, gradients, median_ratio, relative_distance, times_in_turns
from encore.bench.machine import Machine, this_machine
from encore.bench.planning import SIZES as PLANNING_SIZES
from encore.bench.planning import PlanningTime, planning_time
from encore.progress import progress
from encore.workloads import TINY_SIZES, Workload, build

SIZES: dict[str, dict[str, int]] = {
    "transformer": {"batch_size": 32},
    "resnet": {"batch_size": 32},
    "nmt": {"batch_size": 256, "steps": 20},
    "speech": {},
}
"""The workloads, at sizes where feature maps outweigh the gradients."""
BLOCKS = {
    "transformer": ("Block",),
    "resnet": ("Bottleneck",),
    "nmt": ("LSTMCell", "AdditiveAttention"),
    "speech": ("LSTM",),
}
"""The classes of modules that a user would put a checkpoint around."""
SETTINGS: dict[str, tuple[float, ...]] = {
    "transformer": (0.5, 0.1),
    "resnet": (0.5, 0.1),
    "nmt": (0.1,),
    "speech": (0.1,),
}
"""Settings of `activation_memory_budget`; on the unrolled loop one compilation takes minutes."""
ROUNDS, QUICK_ROUNDS = 5, 2
TRIAL_ROUNDS = 3
MARGIN = 0.85
"""How much of the time that eager takes longer may go into recomputation."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """One system on one workload. Bytes and seconds; the ratio is the median over the rounds."""

    system: str
    seconds: float = 0.0
    against_eager: float = 0.0
    peak: int = 0
    reduction: float = 0.0
    """Eager's peak over this one's."""
    predicted: int | None = None
    predicted_seconds: float | None = None
    plan_seconds: float | None = None
    first_step: float = 0.0
    gradient_difference: float = 0.0
    """Distance of all gradients from eager's, relative to those."""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PlanSuite:
    """One run of the suite."""

    machine: Machine
    quick: bool
    rounds: int
    outcomes: dict[str, tuple[PlanOutcome, ...]]
    """By workload."""
    gradients: dict[str, int]
    """Bytes of the gradients themselves, by workload: no plan takes those away."""
    planning: tuple[PlanningTime, ...] = ()
    """How long it takes to plan large graphs."""

    def to_json(self) -> str:
        return json.dumps({"encore_bench_plan": 1, **asdict(self)}, indent=2)


def run_plan(*, quick: bool = False) -> PlanSuite:
    """Measure everything, telling on stderr how far it is."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    outcomes, gradient_bytes = {}, {}
    for name, sizes in SIZES.items():
        make = functools.partial(build, name, **(TINY_SIZES[name] if quick else sizes))
        outcomes[name] = tuple(_compare(name, make, rounds=rounds, quick=quick))
        gradient_bytes[name] = sum(parameter.nbytes for parameter in make().model.parameters())
        torch.compiler.reset()
        gc.collect()
    with progress("planning", len(PLANNING_SIZES)) as tell:
        planning = []
        for name, sizes in PLANNING_SIZES.items():
            planning.append(planning_time(functools.partial(build, name, **(TINY_SIZES[name] if quick else sizes))))
            tell(f"{name}: planned twice")
    return PlanSuite(this_machine(), quick, rounds, outcomes, gradient_bytes, tuple(planning))


class _Contest:
    """The systems that take part on one workload, each with its first step behind it."""

    def __init__(self, make: Callable[[], Workload], tell: Callable[[str], None]) -> None:
        self.make = make
        self.tell = tell
        self.batch = make().batch(0)
        self.trainees: dict[str, Trainee] = {}
        self.first: dict[str, float] = {}
        self.failures: dict[str, str] = {}

    def enter(self, system: str, compile_: Callable[[nn.Module], Any]) -> Trainee | None:
        """Take the first step and warm up; a system that cannot is out, with its reason."""
        try:
            trainee = Trainee(compile_(self.make().model), self.batch)
            started = time.perf_counter()
            trainee.timed()
            self.first[system] = time.perf_counter() - started
            for _ in range(WARM_UP):
                trainee.timed()
        except Exception as error:  # whatever a peer throws is what is shown
            self.failures[system] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            self.tell(f"{system}: failed")
            return None
        self.trainees[system] = trainee
        self.tell(f"{system}: first step and warm-up")
        return trainee


def _compare(name: str, make: Callable[[], Workload], *, rounds: int, quick: bool) -> list[PlanOutcome]:
    settings = () if quick else SETTINGS[name]
    with progress(f"{name:<11}", 7 + len(settings)) as tell:
        contest = _Contest(make, tell)
        contest.enter("eager", lambda model: model)
        by_hand = contest.enter("checkpoint per block", functools.partial(checkpointed, classes=BLOCKS[name]))
        for setting in settings:
            contest.enter(f"activation_memory_budget {setting}", functools.partial(_within_budget, setting=setting))
        contest.enter("Encore, everything kept", functools.partial(encore.compile, overhead=0.0))
        contest.enter("Encore", encore.compile)
        rivals = {system: contest.trainees[system] for system in ("eager", "Encore, everything kept")}
        trial = times_in_turns(rivals, TRIAL_ROUNDS)
        slack = median_ratio(trial["eager"], trial["Encore, everything kept"]) - 1
        contest.enter("Encore, as fast as eager", functools.partial(encore.compile, overhead=max(0.0, MARGIN * slack)))
        if by_hand is not None:
            resident = encore.report(contest.trainees["Encore"].model).resident
            budget = resident + by_hand.measured().step_peak
            contest.enter("Encore at the checkpoints' peak", functools.partial(encore.compile, budget=budget))
        contest.enter("Encore, budget='min'", functools.partial(encore.compile, budget="min"))
        seconds = times_in_turns(contest.trainees, rounds)
        tell("rounds in turns")
    eager_peak = contest.trainees["eager"].measured().step_peak
    truth = gradients(contest.trainees["eager"].model)
    found = [
        _outcome(contest, system, seconds[system], seconds["eager"], eager_peak, truth) for system in contest.trainees
    ]
    return [*found, *(PlanOutcome(system, failure=why) for system, why in contest.failures.items())]


def _outcome(
    contest: _Contest,
    system: str,
    mine: Sequence[float],
    eager: Sequence[float],
    eager_peak: int,
    truth: Sequence[torch.Tensor],
) -> PlanOutcome:
    trainee = contest.trainees[system]
    peak = trainee.measured().step_peak
    report = encore.report(trainee.model) if system.startswith("Encore") else None
    return PlanOutcome(
        system=system,
        seconds=statistics.median(mine),
        against_eager=median_ratio(mine, eager),
        peak=peak,
        reduction=eager_peak / peak,
        predicted=None if report is None else report.planned.step_peak,
        predicted_seconds=None if report is None or not report.planned.seconds else report.planned.seconds,
        plan_seconds=None if report is None else report.first_step["plan"],
        first_step=contest.first[system],
        gradient_difference=relative_distance(gradients(trainee.model), truth),
    )


def _within_budget(model: nn.Module, setting: float) -> Any:
    """`torch.compile` with a memory budget. A backend of its own: Dynamo would take the code of another setting."""

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(activation_memory_budget=setting):
            return compile_fx(module, inputs)  # type: ignore[arg-type]

    return torch.compile(model, backend=backend)


def checkpointed(model: nn.Module, classes: Sequence[str]) -> nn.Module:
    """The model with a checkpoint around every block, as one would write it by hand."""
    for module in model.modules():
        if type(module).__name__ in classes:
            module.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, copy.copy(module.forward), use_reentrant=False
            )
    return model
