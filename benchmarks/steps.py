"""The suite `steps`: one budget for a step that Dynamo may cut into several calls.

Every workload of `workloads/cut.py` is trained by eager PyTorch, with `torch.utils.checkpoint` around its blocks, and
by Encore at budgets of 80, 60 and 40 % of the step with everything kept, and at its lowest peak. All run in one process
on the same seed and batch; rounds of steps are interleaved once the plans of a step stay. A budget that cannot be met
is a row with the floor that its error names.
"""

from __future__ import annotations

import copy
import functools
import gc
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import encore
from benchmarks.schema import Layout, Written
from benchmarks.workloads.cut import CUT_WORKLOADS, TINY_CUT_SIZES, build_cut
from benchmarks.workloads.workload import CutWorkload
from encore.api import compiled_call
from encore.compare.systems import checkpointed
from encore.compare.trainee import Trainee, interleaved_times, median_ratio, ratio_spread, relative_distance
from encore.errors import BudgetError
from encore.machine import Machine, this_machine
from encore.terminal import progress

BUDGETS = ("80%", "60%", "40%", "min")
ROUNDS, QUICK_ROUNDS = 7, 3
SETTLED = 6
"""Steps after which the plans of a step stay."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One system on one workload. Bytes and seconds; those of a budget that cannot be met are None."""

    system: str
    budget: int | None
    """For what the step allocates, without the resident bytes; None if the lowest peak is asked for."""
    predicted: int | None
    measured: int | None
    gradient_error: float | None
    """Distance of all gradients from those of a float64 copy of the model, relative to their size."""
    seconds: float | None
    against_eager: float | None
    spread: tuple[float, float] | None
    """The lowest and the highest of the rounds' ratios to eager."""
    graphs: int | None = None
    calls: int | None = None
    """Calls of graphs in a step."""
    floor: int | None = None
    """The lowest peak that the step can have, as its plans or the error name it."""

    @property
    def is_within(self) -> bool | None:
        """Return whether the measured peak is within the budget; None without a budget or a measurement."""
        if self.budget is None or self.measured is None:
            return None
        return self.measured <= self.budget


@dataclass(frozen=True, slots=True)
class StepSuite(Written):
    """One run of the suite."""

    layout = Layout("encore_bench_steps", 1)

    machine: Machine
    quick: bool
    rounds: int
    outcomes: dict[str, tuple[StepOutcome, ...]]
    """By workload."""
    seconds: float = 0.0
    """What all of it took."""


def run_steps(*, quick: bool = False) -> StepSuite:
    """Measure everything, reporting progress on stderr."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    outcomes = {}
    for name in CUT_WORKLOADS:
        make = functools.partial(build_cut, name, **(TINY_CUT_SIZES[name] if quick else {}))
        with progress(f"{name:<11}", len(BUDGETS) + 2 + rounds) as advance:
            outcomes[name] = tuple(compare_steps(make, rounds=rounds, advance=advance))
        torch.compiler.reset()
        gc.collect()
    return StepSuite(this_machine(), quick, rounds, outcomes)


def compare_steps(
    make: Callable[[], CutWorkload],
    *,
    rounds: int,
    budgets: tuple[str, ...] = BUDGETS,
    advance: Callable[[str], None] = lambda note: None,
    **options: Any,
) -> list[StepOutcome]:
    """All systems on one workload; the last budget is one that can be met."""
    truth = true_gradients(make())
    trainees = {"eager": trainee(make()), "checkpoints": _with_checkpoints(make())}
    for system, one in trainees.items():
        _settle(one, 2)
        advance(system)
    refused = {}
    for budget in budgets:
        workload = make()
        encore.compile(workload.model, budget=budget, **options)
        planned = trainee(workload)
        try:
            _settle(planned, SETTLED)
            trainees[f"Encore, {budget}"] = planned
        except BudgetError as error:
            refused[f"Encore, {budget}"] = error.floor
        advance(f"budget {budget}")
    seconds = interleaved_times({system: one.timed for system, one in trainees.items()}, rounds, advance)
    outcomes = [_outcome(system, one, truth, seconds) for system, one in trainees.items()]
    nothing = dict.fromkeys(("budget", "predicted", "measured", "gradient_error", "seconds", "against_eager", "spread"))
    for system, floor in refused.items():
        resident = encore.report(trainees[f"Encore, {budgets[-1]}"].model.args[0]).resident
        outcomes.append(StepOutcome(system, **nothing, floor=floor - resident))  # type: ignore[arg-type]
    return outcomes


def trainee(workload: CutWorkload) -> Trainee:
    """The model with its loss and its first batch."""
    call = functools.partial(workload.forward, workload.model)
    return Trainee(call, workload.batch(0), closed_over=tuple(workload.model.parameters()))


def true_gradients(workload: CutWorkload) -> list[torch.Tensor]:
    """The gradients of a float64 copy."""
    wide = pytree.tree_map(lambda part: part.double() if part.is_floating_point() else part, workload.batch(0))
    exact = CutWorkload(
        workload.name, copy.deepcopy(workload.model).double(), lambda _: wide, workload.forward, workload.blocks
    )
    one = trainee(exact)
    one.step()
    return one.gradients()


def _with_checkpoints(workload: CutWorkload) -> Trainee:
    checkpointed(workload.model, workload.blocks)
    return trainee(workload)


def _settle(one: Trainee, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Dynamo does not know how to trace the builtin")
        for _ in range(steps):
            one.timed()


def _outcome(system: str, one: Trainee, truth: list[torch.Tensor], seconds: dict[str, list[float]]) -> StepOutcome:
    mine = seconds[system]
    measured = one.measured().step_peak
    plans = _planned(one.model.args[0]) if system.startswith("Encore") else {}
    return StepOutcome(
        system=system,
        measured=measured,
        gradient_error=relative_distance(one.gradients(), truth),
        seconds=statistics.median(mine),
        against_eager=median_ratio(mine, seconds["eager"]),
        spread=ratio_spread(mine, seconds["eager"]),
        **{"budget": None, "predicted": None, **plans},
    )


def _planned(model: nn.Module) -> dict[str, int | None]:
    """What the plans of the latest step say."""
    report, session = encore.report(model), compiled_call(model).session
    session.step.begin()
    program = session.step.last
    if program is None:
        limit, resident, calls = session.last_step[-1].limit, report.resident, 1
        floor = min((peak for peak, _ in session.last_step[-1].choices), default=None)
    else:
        limit, resident, calls, floor = program.limit, program.resident, len(program.calls), program.floor
    return {
        "budget": None if limit is None else limit - resident,
        "predicted": report.planned.step_peak,
        "graphs": len(session.last_step) if program is None else len(set(program.calls)),
        "calls": calls,
        "floor": floor,
    }
