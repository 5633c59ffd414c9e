"""`encore.compile`, `encore.estimate` and `encore.report`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from torch import nn

from encore.capture.torch_private import DataDependent, TraceFailed
from encore.compiler import Session, sessions
from encore.compiler.bypass import BypassWatch
from encore.compiler.compiled import CompiledCall
from encore.compiler.copies import CompiledMark
from encore.compiler.device_estimate import DeviceEstimate
from encore.compiler.device_step import run_device_step
from encore.compiler.estimate import Estimate
from encore.compiler.largest_sizes import LargestSizes
from encore.compiler.recording import Recording
from encore.compiler.session import Arguments
from encore.compiler.sharded import shared_session
from encore.compiler.sharded_estimate import ShardedEstimate, shard_state_bytes
from encore.compiler.simulated_sharding import Sharding
from encore.compiler.summary import report_of
from encore.compiler.twin import fake_twin
from encore.devices import DeviceProfile, find_profile
from encore.errors import BudgetError, NeverRunError, OptionError
from encore.options import Budget, Options, arguments_of, make_options
from encore.reports.report import Report
from encore.units import bytes_text

log = logging.getLogger("encore")

Model = TypeVar("Model", bound=Callable[..., Any])


@overload
def compile(model: Model, **options: Any) -> Model: ...
@overload
def compile(model: None = None, **options: Any) -> Callable[[Model], Model]: ...
def compile(model: Model | None = None, **options: Any) -> Any:
    """Plan the training step of a module or function; the plan is made at its first call with gradients enabled.

    A module is compiled in place and returned: its identity, parameters, `state_dict`, hooks and source stay as they
    are. For a function, a new function is returned. Without a model, a decorator is returned.

    Options: `budget` (bytes, "2GiB", "60%", "min") bounds resident + step_peak and takes the fastest plan that fits;
    `overhead` (default 0.05) takes the smallest peak within that extra time; `plan` uses a saved one; `keep` names
    modules whose activations are kept; `methods` names what may be done with the others ("recompute", "encode",
    "stash"); `lossy` allows lossy codecs within a bound on the relative gradient error (True: 0.01), or by name without
    one, and `lossy_check` measures that error every so many steps, too; `tiers` names where activations may be
    offloaded to ("disk"); `optimizer` or `resident` add bytes that stay allocated during the step; `strict=True` raises
    `BudgetExceededError` after a step that took more than its budget, where a warning is the default; `largest`, an
    example of the largest batch (a tensor, a tuple of arguments or a dict; tensors may be on the meta device), raises
    `BudgetError` at once if that batch cannot fit, and makes percentages those of its step; its sizes alone, such as
    `{"words": (32, 512)}` or `{1: 512}`, do so when the first batch comes, before its step; `lowering`, `skip`,
    `recompile_limit`: see `encore.options.Options`.
    """
    checked = make_options(options)
    largest = options.get("largest")
    if model is None:
        return lambda later: compile(later, **options)
    if not callable(model):
        raise OptionError(f"encore.compile takes a module or a function, not {type(model).__name__}")
    if isinstance(model, nn.Module):
        _require_trainable(model)
    sizes = LargestSizes.read(largest)
    if sizes is None:
        checked = _for_largest(model, checked, largest)
    else:
        sizes.require_parameters(_called(model))
    session = Session(_name(model), checked)
    session.on_first_batch = None if sizes is None else functools.partial(_check_largest, sizes)
    if not isinstance(model, nn.Module):
        return CompiledCall(model, session)
    _compile_module(model, session)
    return model


def _for_largest(model: Callable[..., Any], options: Options, batch: Any) -> Options:
    """The options with a percentage as budget in bytes, for an example of the largest batch."""
    if batch is None or options.budget is None:
        return options
    return _within_budget(_name(model), options, model, *arguments_of(batch, "largest= is a"))


def _check_largest(sizes: LargestSizes, session: Session, first: Arguments) -> None:
    """Do the same for a batch that has these sizes, and all else from the first batch."""
    call, args, kwargs = first
    args, kwargs, shapes = sizes.batch(call, args, kwargs)
    owner = getattr(call, "__self__", None)
    if isinstance(owner, nn.Module) and call.__name__ == "_call_impl":
        call = owner
    with _named_shapes(shapes):
        session.options = _within_budget(session.name, session.options, call, args, kwargs, shapes)


@contextlib.contextmanager
def _named_shapes(shapes: str) -> Iterator[None]:
    """Add the shapes of a batch that was made from sizes to errors of it."""
    try:
        yield
    except OptionError as error:
        raise OptionError(
            f"the largest batch (largest=), with {shapes}: {error}. Sizes that largest= does not have stay as they are"
        ) from error


def _within_budget(
    name: str,
    options: Options,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: str = "largest=",
) -> Options:
    """The options with a percentage as budget in bytes, for the largest batch, which is estimated; raises `BudgetError`
    if no plan of it is within the budget."""
    budget = options.budget
    assert budget is not None, "largest= is not accepted without one"
    found = estimate_with(dataclasses.replace(options, budget=None), call, args, kwargs)
    if budget.share is not None:
        budget = Budget(bytes=budget.resolve(found.taken_unplanned))
    try:
        planned = found.plan(budget)
    except BudgetError as error:
        message = f"the largest batch of {name} ({shapes}): {error.message}"
        raise BudgetError(message, floor=error.floor, pins=error.pins, remedies=error.remedies) from None
    log.info(
        "the largest batch of %s (%s) needs %s, and %s with everything kept",
        name, shapes, bytes_text(planned.resident + planned.planned.step_peak), bytes_text(found.taken_unplanned),
    )  # fmt: skip
    return dataclasses.replace(options, budget=budget)


def _called(model: Callable[..., Any]) -> list[Callable[..., Any]]:
    """What users call of a model."""
    if not isinstance(model, nn.Module):
        return [model]
    return [model.forward, *([_plain(model.training_step)] if _trains_by_method(model) else [])]


def _compile_module(model: nn.Module, session: Session) -> None:
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # copies of a module are not flat: cuDNN would copy their weights at every call
    before = model._compiled_call_impl
    if isinstance(before, CompiledCall) and before.session.bypass is not None:
        before.session.bypass.stop()
    model._compiled_call_impl = CompiledCall(model._call_impl, session)
    if _trains_by_method(model):
        model.training_step = CompiledCall(_plain(model.training_step), session)  # type: ignore[assignment]
    model.__dict__[CompiledMark.NAME] = CompiledMark(model)
    session.bypass = BypassWatch(model)


def _trains_by_method(model: nn.Module) -> bool:
    """Return whether this is a LightningModule, whose `training_step` is called by Lightning's loop and need not call
    the module."""
    kinds = [kind for kind in type(model).__mro__ if kind.__name__ == "LightningModule"]
    lightning = any(kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning") for kind in kinds)
    return lightning and bool(getattr(model, "automatic_optimization", True))


def _plain(call: Any) -> Any:
    return call.plain if isinstance(call, CompiledCall) else call


def _require_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(
            f"{type(model).__name__} has no trainable parameter, so there is no training step to plan; "
            "unfreeze one, or, if its inputs need gradients, compile a function that calls it"
        )


def report(model: Callable[..., Any]) -> Report:
    """Return the report of a compiled model, after its first step."""
    found = _find_sessions(model)
    graphs = [graph for session in found for graph in session.last_step]
    if not graphs:
        raise NeverRunError(_why_there_is_no_plan(model, found))
    plain = [graph for session in found for graph in session.plain]
    program = found[0].step.program if len(found) == 1 else None
    measured = found[0].step.latest_measured() if len(found) == 1 else None
    return report_of(found[0].name, graphs, found[0].options, plain, program, measured)


def _why_there_is_no_plan(model: Any, found: list[Session]) -> str:
    plain = [graph for session in found for graph in session.plain]
    if plain:
        why = f"ran as plain PyTorch, so there is no plan to report: {plain[0].reason}"
    elif reasons := [session.why_plain for session in found if session.why_plain]:
        why = f"has no plan to report: it {reasons[0]}"
    elif any(session.calls for session in found):
        why = "ran, but no call led to a gradient; give it a trainable parameter, or an input with requires_grad=True"
    else:
        why = (
            "has not run a training step yet; run one, or call encore.estimate(model, *args) for a prediction that "
            "runs nothing"
        )
    return f"{_name(model)} {why}"


def _find_sessions(model: Any) -> list[Session]:
    if isinstance(model, CompiledCall):
        return [model.session]
    if isinstance(model, nn.Module) and isinstance(model._compiled_call_impl, CompiledCall):
        return [model._compiled_call_impl.session]
    shared = shared_session(model) if isinstance(model, nn.Module) else None
    if shared is not None:
        return [shared]
    parameters = {id(parameter) for parameter in model.parameters()} if isinstance(model, nn.Module) else set()
    owners = [session for session in sessions if session.owns_any(parameters)]
    if not owners and not _is_torch_compiled(model):
        raise NeverRunError(
            f"{_name(model)} was not compiled by Encore; call encore.compile(model) first, "
            "or encore.estimate(model, *args)"
        )
    latest = max((session.last_step_number for session in owners), default=-1)
    current = [session for session in owners if session.last_step_number == latest]
    return sorted(current, key=lambda session: session.born)


def _is_torch_compiled(model: Any) -> bool:
    return hasattr(model, "_orig_mod") or hasattr(model, "_torchdynamo_orig_callable")


def _name(model: Any) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__qualname__", repr(model))


@overload
def estimate(
    model: Callable[..., Any], *args: Any, device: None = None, shards: None = None, **kwargs: Any
) -> Estimate: ...
@overload
def estimate(
    model: Callable[..., Any],
    *args: Any,
    shards: int | Sharding,
    device: str | DeviceProfile | None = None,
    optimizer: Any = None,
    **kwargs: Any,
) -> ShardedEstimate: ...
@overload
def estimate(
    model: Callable[..., Any], *args: Any, device: str | DeviceProfile, optimizer: Any = None, **kwargs: Any
) -> DeviceEstimate: ...
def estimate(
    model: Callable[..., Any],
    *args: Any,
    device: str | DeviceProfile | None = None,
    optimizer: Any = None,
    largest: Any = None,
    shards: int | Sharding | None = None,
    **kwargs: Any,
) -> Estimate | DeviceEstimate | ShardedEstimate:
    """Estimate the memory and seconds of a training step. Nothing runs and nothing is allocated.

    Module and arguments may be real, on the meta device, or larger than the memory of this machine: only their shapes
    are read. If the step consists of several graphs, all of it is estimated, plain code between them included; a loss
    outside of the model is not. A function is copied with the modules that it closes over.

    With `device="RTX3060"` or another name in `encore.devices.PROFILES`, the answer is what a training loop of plain
    PyTorch reserves on that GPU, which need not be here, and whether it fits; `optimizer`, a class, a name or an
    instance, is part of it.

    With `shards=64`, a module that is not sharded is taken as one that FSDP2 shards over 64 ranks, block by block, and
    the answer is what the step takes on one of them: what is gathered, reduced and kept around the blocks included.
    `shards=encore.Sharding(...)` names blocks and types.

    With `largest`, an example of the largest batch or its sizes as in `encore.compile`, that batch is estimated, too
    (`Estimate.largest`): percentages are of its step, and a budget fits if both batches fit it.
    """
    if shards is not None:
        if largest is not None:
            raise OptionError(
                "largest= and shards= exclude each other; call encore.estimate(model, *largest, shards=...)"
            )
        return _sharded_estimate(_plain(model), args, kwargs, shards, device, optimizer)
    if device is None:
        found = estimate_with(make_options({}), model, args, kwargs)
        if largest is not None:
            found = dataclasses.replace(found, largest=_estimated_largest(model, args, kwargs, largest))
        return found if optimizer is None else found.beside(optimizer=optimizer)
    if largest is not None:
        raise OptionError("largest= and device= exclude each other; call encore.estimate(model, *largest, device=...)")
    profile, plain = find_profile(device), _plain(model)
    step = run_device_step(plain, args, kwargs, profile, optimizer)
    return DeviceEstimate(_name(plain), profile, step, lambda: estimate_with(make_options({}), plain, args, kwargs))


def _estimated_largest(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], largest: Any
) -> Estimate:
    """The estimate of the largest batch: an example, or sizes of a batch like this one."""
    sizes = LargestSizes.read(largest)
    if sizes is None:
        return estimate_with(make_options({}), model, *arguments_of(largest, "largest= is a"))
    sizes.require_parameters(_called(_plain(model)))
    args, kwargs, shapes = sizes.batch(_plain(model), args, kwargs)
    with _named_shapes(shapes):
        return estimate_with(make_options({}), model, args, kwargs)


def _sharded_estimate(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shards: int | Sharding, device: Any, optimizer: Any
) -> ShardedEstimate:
    """Estimate a step of a module on one of the ranks that it would be sharded over."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"shards= is for a module, whose blocks FSDP2 shards, and not for {_name(model)}")
    sharding = shards if isinstance(shards, Sharding) else Sharding(shards)
    profile = None if device is None else find_profile(device)
    resident = shard_state_bytes(optimizer, model, sharding)
    options = make_options({"resident": resident, **({} if profile is None else {"lowering": "eager"})})
    found = estimate_with(options, model, args, kwargs, sharding, here=profile is None)
    return ShardedEstimate(_name(model), sharding, found, profile)


def estimate_with(
    options: Options,
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sharding: Sharding | None = None,
    *,
    here: bool = True,
) -> Estimate:
    """Estimate a training step of a model that is compiled with these options, and sharded, if `sharding` is given;
    on this machine, if it is `here`."""
    plain = model.plain if isinstance(model, CompiledCall) else model
    recording = Recording(_name(plain), options, sharding=sharding)
    recording.session.workspaces.bounds = here
    try:
        recording.run(fake_twin(plain, args, kwargs, recording.memory.mode))
    except TraceFailed as failure:
        why = str(failure).strip().splitlines()[0]
        raise OptionError(f"{_name(plain)} cannot be called with these arguments: {why}") from failure
    except DataDependent as failure:
        raise OptionError(
            f"what {_name(plain)} does depends on data, which an estimate has none of ({failure.func}); run a step of "
            "the compiled model, and ask encore.report"
        ) from failure
    if not recording.calls and not recording.session.graphs:
        raise OptionError(
            f"a call of {_name(plain)} with these arguments leads to no gradient; "
            "encore.estimate needs a training step: a trainable parameter, or an input with requires_grad=True"
        )
    return Estimate.of(recording)


def compiled_call(model: Callable[..., Any]) -> CompiledCall:
    """Return the compiled call of a module or function."""
    if isinstance(model, CompiledCall):
        return model
    call = getattr(model, "_compiled_call_impl", None)
    if isinstance(call, CompiledCall):
        return call
    raise OptionError(f"{_name(model)} was not compiled by encore.compile; compile it first")
