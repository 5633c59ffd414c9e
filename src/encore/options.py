"""The options of `encore.compile`, checked before anything is traced."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from encore.codecs import CODECS
from encore.errors import OptionError, listed
from encore.fates import method_names
from encore.plan import SavedPlan
from encore.plan.goal import Budget as Budget
from encore.plan.saved import LOWERINGS as LOWERINGS
from encore.tiers import Tier, check_tiers
from encore.units import MOST_BYTES, UNITS, number_and_unit, shown

METHODS = method_names()
"""What may be done with an activation that is not kept: recomputed, encoded or, in a recurrent layer, recomputed from
what the layer stashes."""
FUSED_PASSES = (
    "recurrent", "score_attention", "block_attention", "read_sizes", "mask_before_unpooling", "read_kept",
    "sign_masks", "narrow_masks", "channels_last", "split_convolutions", "sign_bits", "pool_maps", "narrow_indices",
    "transpose_weights", "hoist_projections", "merge_siblings", "fold_additions", "stack_weight_gradients",
    "postpone_gradients", "split_head", "fuse",
)  # fmt: skip
"""The passes of the fused lowering, in this order; each can be skipped."""
DEFAULT_OVERHEAD = 0.05
MOST_PERCENT = 10**6
ACCEPTED_BUDGETS = (
    "a positive number of bytes, '2GiB', '500MB', '60%' (of the largest unplanned step), 'min' or, on a GPU, 'device'"
)


def parse_budget(budget: int | float | str | Budget) -> Budget:
    """Parse a budget as users write it."""
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        return _parse_budget_text(budget)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise OptionError(f"budget={budget!r} is not a budget; give {ACCEPTED_BUDGETS}")
    if not 1 <= budget <= MOST_BYTES:  # never true of NaN
        raise OptionError(f"budget={shown(budget)} is not positive, or too large; give {ACCEPTED_BUDGETS}")
    return Budget(bytes=int(budget))


def _parse_budget_text(text: str) -> Budget:
    if text.strip().lower() == "min":
        return Budget()
    if text.strip().lower() == "device":
        return Budget(device=True)
    number, unit = number_and_unit(text)
    if unit != "%" and unit not in UNITS:
        raise OptionError(f"budget={shown(text)} cannot be read; give {ACCEPTED_BUDGETS}")
    if unit == "%":
        if not 0 < number <= MOST_PERCENT:
            raise OptionError(
                f"budget={shown(text)} is not positive, or more than {MOST_PERCENT} %; give {ACCEPTED_BUDGETS}"
            )
        return Budget(share=number / 100)
    if not 1 <= number * UNITS[unit] <= MOST_BYTES:
        raise OptionError(f"budget={shown(text)} is not positive, or too large; give {ACCEPTED_BUDGETS}")
    return Budget(bytes=int(number * UNITS[unit]))


DEFAULT_GRADIENT_ERROR = 0.01


@dataclass(frozen=True)
class Lossy:
    """The lossy codecs that a planner may use, and the bound on the gradient error that they may cause."""

    codecs: tuple[str, ...] = ()
    bound: float | None = None
    """Largest relative gradient error on the first batch (`cost/gradient_error.py` defines it); None: no bound."""

    def __bool__(self) -> bool:
        return bool(self.codecs)


class KnownOptimizer:
    """An optimizer that was given as an option, which it does not keep alive."""

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def bytes_to_come(self, whole: int) -> int:
        """How much of its state, and of other resident bytes, is not allocated yet."""
        optimizer = None if self._optimizer is None else self._optimizer()
        return whole if optimizer is None else max(0, whole - state_bytes(optimizer))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@dataclass(frozen=True)
class Options:
    """How a model is compiled. Either `budget` or `overhead` steers the plan, never both."""

    budget: Budget | None = None
    """Upper bound on resident + step_peak; the fastest plan that fits is taken. On a GPU, bytes and "device" bound what
    is reserved there, with the context."""

    overhead: float | None = None
    """Extra step time allowed, as a fraction; the smallest peak within it is taken. 0.05 by default."""

    resident: int = 0
    """Bytes besides parameters, buffers and inputs that stay allocated during the step, such as optimizer state."""

    optimizer: KnownOptimizer | None = dataclasses.field(default=None, compare=False, repr=False)
    """The optimizer whose state is in `resident`."""

    lowering: str = "fused"
    """How the schedule runs: "fused" compiles runs of cheap operators into kernels, "eager" calls PyTorch's own
    operators one by one, with results equal to plain PyTorch's bit for bit."""

    skip: tuple[str, ...] = ()
    """Passes of the fused lowering that are not to run, out of `FUSED_PASSES`."""

    plan: SavedPlan | None = None
    """A saved plan: `encore.report(model).plan`, or the file that it was saved to."""

    keep: tuple[str, ...] = ()
    """Modules (patterns such as "encoder.*") whose activations are kept whatever the budget."""

    methods: tuple[str, ...] = METHODS
    """What may be done with activations that are not kept, out of `METHODS`."""

    lossy: Lossy = Lossy()
    """Lossy codecs. `lossy=0.05` allows those whose measured effect on the gradients of the first batch stays within a
    relative error of 0.05, `lossy=True` within `DEFAULT_GRADIENT_ERROR`; names of codecs allow these, without a
    bound."""

    lossy_check: int = 0
    """Measure the gradient error of lossy codecs every so many steps, too, on the batch of that step: at steps 1, 10,
    100, 1000, ... it is measured in any case."""

    tiers: tuple[str | Tier, ...] = ()
    """Where activations may be offloaded between forward and backward: "disk", "host" (from a GPU), or tier objects."""

    strict: bool = False
    """Measure every step, and raise `BudgetExceededError` before the next one if a step took more than its budget. By
    default, the first steps and a few later ones are measured, and one warning is given."""

    recompile_limit: int | None = None
    """How many shapes (or other variants) of one model are planned before the rest runs as plain eager PyTorch. By
    default, every shape is planned, and the least recently used are dropped from memory."""

    @property
    def allowed_overhead(self) -> float:
        return DEFAULT_OVERHEAD if self.overhead is None else self.overhead


def make_options(given: Mapping[str, Any]) -> Options:
    """Check what the user gave and fill in the rest. `optimizer=` becomes `resident` bytes; what `largest=` is, the
    caller takes from it (`arguments_of`)."""
    known = {field.name for field in dataclasses.fields(Options)} | {"largest"}
    unknown = set(given) - known
    if unknown:
        raise OptionError(f"unknown option {listed(unknown)}; encore.compile accepts {listed(known)}")
    chosen = {name: value for name, value in given.items() if value is not None}
    optimizer = chosen.pop("optimizer", None)
    if "budget" in chosen and "overhead" in chosen:
        raise OptionError("budget= and overhead= exclude each other; give one of them")
    if chosen.pop("largest", None) is not None and "budget" not in chosen:
        raise OptionError("largest= is the batch that budget= must suffice for; give a budget")
    if "budget" in chosen:
        chosen["budget"] = parse_budget(chosen["budget"])
    _check_number(chosen, "overhead", float, 0, "a fraction of at least 0, such as 0.05")
    _check_number(chosen, "resident", int, 0, "bytes, at least 0")
    _check_number(chosen, "recompile_limit", int, 1, "a count of at least 1")
    _check_number(chosen, "lossy_check", int, 0, "a number of steps, or 0")
    if chosen.get("lowering", LOWERINGS[0]) not in LOWERINGS:
        raise OptionError(f"lowering={chosen['lowering']!r} does not exist; it can be {listed(LOWERINGS)}")
    if not isinstance(chosen.get("strict", False), bool):
        raise OptionError(f"strict={shown(chosen['strict'])} is not accepted; give True or False")
    if chosen.get("strict") and "budget" not in chosen:
        raise OptionError("strict=True has no effect without budget=; give a budget")
    if "skip" in chosen:
        chosen["skip"] = _passes(chosen["skip"])
    if "plan" in chosen:
        if "budget" in chosen or "overhead" in chosen:
            raise OptionError("plan= has all decisions already; give it without budget= and overhead=")
        chosen["plan"] = _saved_plan(chosen["plan"])
        lowering = chosen.setdefault("lowering", chosen["plan"].lowering)
        if lowering != chosen["plan"].lowering:
            raise OptionError(f"the plan was made for lowering={chosen['plan'].lowering!r}, not {lowering!r}")
    if "keep" in chosen:
        chosen["keep"] = _patterns(chosen["keep"])
    if "methods" in chosen:
        chosen["methods"] = _methods(chosen["methods"])
    if "lossy" in chosen:
        chosen["lossy"] = _lossy(chosen["lossy"])
    if "tiers" in chosen:
        chosen["tiers"] = _tiers(chosen["tiers"])
    if optimizer is not None:
        chosen["resident"] = chosen.get("resident", 0) + optimizer_bytes(optimizer)
        chosen["optimizer"] = KnownOptimizer(_unwrapped(optimizer))
    return Options(**chosen)


def arguments_of(batch: Any, given_by: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a batch is a tensor, a tuple of arguments, or a dict of keyword arguments."""
    import torch

    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise OptionError(f"{given_by} {type(batch).__name__}; give a tensor, a tuple of arguments, or a dict")


def _passes(names: Any) -> tuple[str, ...]:
    """Names of passes, checked; one may be given by itself."""
    given = _several(names, "skip", FUSED_PASSES)
    for name in given:
        if name not in FUSED_PASSES:
            raise OptionError(f"skip={name!r} is not a pass of the fused lowering; there are {listed(FUSED_PASSES)}")
    return given


def _methods(given: Any) -> tuple[str, ...]:
    """Names of methods, checked; one may be given by itself."""
    known = method_names()
    names = _several(given, "methods", known)
    for name in names:
        if name not in known:
            raise OptionError(f"methods={name!r} is not a method; there are {listed(known)}")
    if not names:
        raise OptionError(f"methods= names none; give some of {listed(known)}, or overhead=0 to keep everything")
    return tuple(name for name in known if name in names)


ACCEPTED_LOSSY = "True, False, a bound on the relative gradient error between 0 and 1, such as 0.01, or names of codecs"


def _lossy(given: Any) -> Lossy:
    """A bound on the gradient error, or names of lossy codecs; a name may be given by itself, and "fp8" is short for
    every format whose name begins with it."""
    if isinstance(given, Lossy):
        return given
    known = tuple(name for name, codec in CODECS.items() if not codec.lossless)
    if isinstance(given, bool):
        return Lossy(known, DEFAULT_GRADIENT_ERROR) if given else Lossy()
    if isinstance(given, int | float):
        if not 0 < given < 1:  # NaN, too
            raise OptionError(f"lossy={given!r} is not a bound on the relative gradient error; give {ACCEPTED_LOSSY}")
        return Lossy(known, float(given))
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple | set | frozenset):
        raise OptionError(f"lossy={given!r} is not accepted; give {ACCEPTED_LOSSY}: {listed(known)}")
    chosen: set[str] = set()
    for name in names:
        meant = {one for one in known if one == name or one.startswith(f"{name}_e")}
        if not meant:
            raise OptionError(f"lossy={name!r} is not a lossy codec; there are {listed(known)}")
        chosen |= meant
    return Lossy(tuple(name for name in known if name in chosen))


def _tiers(given: Any) -> tuple[str | Tier, ...]:
    """Tiers, checked: at most one of each kind, since plans name them by their kind."""
    tiers = check_tiers(given)
    kinds = [tier_name(tier) for tier in tiers]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise OptionError(f"tiers= names {kind!r} twice; give one of each kind")
    return tiers


def tier_name(tier: str | Tier) -> str:
    """The kind of a tier, by which plans name it."""
    return tier if isinstance(tier, str) else tier.name


def _saved_plan(given: Any) -> SavedPlan:
    if isinstance(given, SavedPlan):
        return given
    if isinstance(given, str | os.PathLike):
        return SavedPlan.load(os.fspath(given))
    raise OptionError(f"plan={given!r} is not a plan; give encore.report(model).plan, or the path it was saved to")


def _patterns(given: Any) -> tuple[str, ...]:
    """Module patterns, checked; one may be given by itself."""
    patterns = _several(given, "keep", ("encoder.*",))
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise OptionError(f"keep={pattern!r} is not a module pattern; give names such as 'encoder.*'")
    return patterns


def _several(given: Any, option: str, known: Iterable[str]) -> tuple[Any, ...]:
    """A list of names; one may be given by itself."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise OptionError(f"{option}={shown(given)} is not accepted; give names, such as {listed(known)}")
    return tuple(given)


def _check_number(chosen: Mapping[str, Any], name: str, kind: type, least: float, accepted: str) -> None:
    if name not in chosen:
        return
    value = chosen[name]
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits or not least <= value <= MOST_BYTES:  # never true of NaN
        raise OptionError(f"{name}={shown(value)} is not accepted; give {accepted}")


STATE_PER_PARAMETER = {
    "SGD": (0, 0), "Adam": (2, 1), "AdamW": (2, 1), "NAdam": (2, 2), "RAdam": (2, 1), "Adamax": (2, 1),
    "Adagrad": (1, 1), "RMSprop": (1, 1),
}  # fmt: skip
"""How many tensors of the parameter's size, and how many float32 scalars, an optimizer keeps for each parameter."""


def optimizer_bytes(optimizer: Any) -> int:
    """Bytes of the optimizer's state: its present one, or what its class allocates at its first step. Hosts wrap
    optimizers; what they wrap is read."""
    import torch

    optimizer = _unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer={optimizer!r} is not a torch.optim.Optimizer; give one, or resident= in bytes")
    if present := state_bytes(optimizer):
        return present
    return sum(
        _state_bytes(optimizer, group, _memory_here(parameter).nbytes())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def _memory_here(tensor: Any) -> Any:
    """The memory of a tensor; of a distributed one, what this rank has of it."""
    local = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()


def _unwrapped(optimizer: Any) -> Any:
    import torch

    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def state_bytes(optimizer: Any) -> int:
    """Bytes of the state that an optimizer has now; of distributed tensors, those of this rank."""
    import torch

    storages = {
        (memory := _memory_here(tensor)).data_ptr(): memory.nbytes()
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def _state_bytes(optimizer: Any, group: Mapping[str, Any], parameter_bytes: int) -> int:
    """Bytes that this optimizer keeps for one parameter of a group."""
    name = type(optimizer).__name__
    if name not in STATE_PER_PARAMETER:
        raise OptionError(
            f"the state that {name} will allocate is not known before its first step; "
            f"pass resident= in bytes, or one of {listed(STATE_PER_PARAMETER)}"
        )
    copies, scalars = STATE_PER_PARAMETER[name]
    copies += name in ("SGD", "RMSprop") and group.get("momentum", 0) != 0
    copies += name == "RMSprop" and group.get("centered", False)
    copies += bool(group.get("amsgrad", False))
    return copies * parameter_bytes + 4 * scalars
