"""`encore compare`: Encore and its alternatives on a user's own model."""

from __future__ import annotations

import copy
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from encore import api
from encore.compare import systems
from encore.compare.contest import EAGER, Contest
from encore.compare.outcome import Outcome, finite
from encore.compare.recommendation import Recommendation, recommend
from encore.compare.table import outcome_table
from encore.compare.trainee import Trainee
from encore.errors import BudgetError, EncoreError, OptionError
from encore.graph.torch_private import pytree
from encore.machine import Machine, this_machine
from encore.options import Budget, parse_budget
from encore.terminal import progress
from encore.units import bytes_text

ROUNDS = 7
CHECKPOINT = "torch.utils.checkpoint per block"
COMPILE = "torch.compile"
MEMORY_BUDGET = "activation_memory_budget"
SETTINGS = (0.7, 0.4, 0.1)
"""Of it."""
DEFAULT, LOWEST = "Encore", "Encore, budget='min'"
NO_BLOCKS = "the model has no repeated blocks: no class of its modules with parameters and parts occurs twice"


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """All systems on one model."""

    target: str
    machine: Machine
    resident: int
    """Bytes of parameters, buffers and inputs."""
    budget: int | None
    """Upper bound on resident + peak, in bytes, if one was given."""
    blocks: int
    """Blocks that a checkpoint was put around."""
    rounds: int
    outcomes: tuple[Outcome, ...]
    recommendation: Recommendation | None
    seconds: float
    """The comparison took so long."""
    fits: bool = True
    """Whether a system meets the budget, if one was given."""
    budget_error: BudgetError | None = None
    """Encore's, if no system meets the budget."""

    def to_json(self) -> str:
        """Everything as JSON; `encore_compare` is the version of its layout."""
        found = asdict(self)
        del found["budget_error"]
        return json.dumps({"encore_compare": 1, **finite(found)}, indent=2, allow_nan=False)

    def __str__(self) -> str:
        bound = "" if self.budget is None else f"; the budget for resident + peak is {bytes_text(self.budget)}"
        lines = [f"{self.target}: {bytes_text(self.resident)} resident (parameters, buffers, inputs){bound}", ""]
        lines += [outcome_table(self.outcomes), ""]
        lines += [] if self.recommendation is None else [str(self.recommendation)]
        return "\n".join(lines)


def compare_systems(
    target: str,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    budget: str | None = None,
    minutes: float | None = None,
    rounds: int = ROUNDS,
) -> ModelComparison:
    """Measure every system on copies of the model. Systems that take too long for `minutes` are left out."""
    started = time.perf_counter()
    wanted = None if budget is None else parse_budget(budget)
    _require_real(target, model, args, kwargs)
    prepared = dict(_systems(model, budget, wanted))
    with progress(target, len(prepared) + rounds) as advance, torch.random.fork_rng():
        contest = Contest(
            functools.partial(_fresh, model, args, kwargs),
            advance,
            rounds=rounds,
            until=None if minutes is None else started + 60 * minutes,
            like=_like,
            always=(EAGER, CHECKPOINT, DEFAULT, _budgeted(budget)),
        )
        for system, prepare in prepared.items():
            if isinstance(prepare, str):
                contest.leave_out(system, prepare)
                continue
            contest.enter(system, prepare)
            if system == EAGER and _float64_is_affordable(contest):
                contest.compare_with_float64()
        outcomes = contest.outcomes(contest.times(list(contest.trainees), rounds, advance))
    if not any(one.ran for one in outcomes):
        first = outcomes[0]
        raise EncoreError(f"no system can train {target}; {first.system} fails with {first.failure}")
    resident = _resident(next(iter(contest.trainees.values())))
    limit = _limit(wanted, contest, outcomes, resident)
    smallest = wanted is not None and wanted.is_floor
    fits = limit is None or any(one.ran and resident + one.peak <= limit for one in outcomes)
    return ModelComparison(
        target=target,
        machine=this_machine(),
        resident=resident,
        budget=limit,
        blocks=len(systems.repeated_blocks(model)),
        rounds=rounds,
        outcomes=tuple(outcomes),
        recommendation=recommend(outcomes, resident=resident, limit=limit, smallest=smallest),
        seconds=time.perf_counter() - started,
        fits=fits,
        budget_error=None if fits else contest.budget_error,
    )


def _systems(
    model: Callable[..., Any], text: str | None, budget: Budget | None
) -> Iterator[tuple[str, Callable[[Any], Any] | str]]:
    """Every system with what prepares a model for it, or with the reason why it is left out."""
    yield EAGER, systems.eager
    yield CHECKPOINT, systems.checkpointed if systems.repeated_blocks(model) else NO_BLOCKS
    yield COMPILE, systems.compiled
    for setting in SETTINGS:
        yield f"{MEMORY_BUDGET} {setting}", functools.partial(systems.within_budget, setting=setting)
    yield DEFAULT, api.compile
    if budget is not None and not budget.is_floor:
        yield _budgeted(text), functools.partial(api.compile, budget=budget)
    yield LOWEST, functools.partial(api.compile, budget="min")


def _budgeted(budget: str | None) -> str:
    return f"Encore, budget={budget!r}"


def _like(system: str) -> str:
    if system.startswith("Encore"):
        return DEFAULT
    return COMPILE if system.startswith(MEMORY_BUDGET) else EAGER


def _fresh(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trainee:
    """A copy of a module; a function is shared by all systems, with the tensors that it closes over."""
    if isinstance(model, nn.Module):
        return Trainee(copy.deepcopy(model), args, kwargs)
    alone = Trainee(model, args, kwargs)
    given = {id(leaf) for leaf in alone.leaves()}
    closed_over = tuple(leaf for leaf in _leaves_behind(alone.outputs()) if id(leaf) not in given)
    return Trainee(model, args, kwargs, closed_over)


def _leaves_behind(outputs: list[Tensor]) -> Iterator[Tensor]:
    """The tensors that backward from these outputs accumulates gradients in."""
    waiting = [output.grad_fn for output in outputs]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        waiting += [following for following, _ in node.next_functions]


def _tensors(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    if isinstance(model, nn.Module):
        yield from model.parameters()
        yield from model.buffers()
    yield from (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _require_real(target: str, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(tensor.is_meta for tensor in _tensors(model, args, kwargs)):
        raise OptionError(
            f"{target} returns tensors on the meta device, and a comparison runs the model; return it on a device "
            "that is there, or predict its step with `encore estimate`"
        )


def _resident(trainee: Trainee) -> int:
    """Bytes of parameters, buffers, inputs, and what a function closes over."""
    tensors = [*_tensors(trainee.model, trainee.args, dict(trainee.kwargs)), *trainee.closed_over]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _float64_is_affordable(contest: Contest) -> bool:
    """Return whether a step in float64 is short and needs little of the machine's memory."""
    trainee = contest.trainees.get(EAGER)
    if trainee is None or contest.slow or any(leaf.device.type != "cpu" for leaf in trainee.leaves()):
        return False
    return 2 * (_resident(trainee) + contest.peaks[EAGER]) < this_machine().memory / 4


def _limit(budget: Budget | None, contest: Contest, outcomes: list[Outcome], resident: int) -> int | None:
    """The budget in bytes. A share is one of what Encore's unplanned step takes, as in `encore.compile`, or of eager's
    if Encore did not run."""
    if budget is None or budget.is_floor:
        return None
    reports = [contest.report(one.system) for one in outcomes if one.ran]
    unplanned = next((one.resident + one.unplanned.step_peak for one in reports if one is not None), None)
    return budget.of_step(unplanned or resident + contest.peaks.get(EAGER, 0)).bytes
