"""The error that lossy codecs cause in the gradients of a step, measured on real tensors.

**Definition.** Let g be the gradients of all parameters, one after the other as one vector, from a run of the step in
which every lossy code is the activation itself, and g' the same from a run with the codes. The error is
|g' - g| / |g| in the Euclidean norm. It bounds how far an optimizer's direction turns (its sine is at most the error)
and how much longer or shorter it gets; a single parameter whose own gradient is tiny may be further off, so the largest
error of a parameter is reported next to it. Gradients of inputs (of graphs that are not the first of their step)
form a second vector; the larger error of the two counts.

Both runs have the same schedule, kernels, buffers and draws, so rounding that is not due to codecs is the same in
both, also in a network that magnifies rounding. New contents of buffers are results of a graph and are not copied here,
and the states of generators are restored, so that the step itself is unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encore.codecs import CODECS, Codec
from encore.devices import generators_kept
from encore.graph import Graph, Op, OpClass, Role
from encore.graph.random_ops import DrawState
from encore.graph.tier_ops import LoadFrom, StoreTo
from encore.graph.torch_private import FakeTensor, OpOverload
from encore.lower.codegen import Lowered, lower
from encore.lower.kernels import CompiledKernel
from encore.schedule import Action, Load, Run, Schedule, Store, Wait

UNREPEATABLE = frozenset({OpClass.MUTATING, OpClass.COLLECTIVE, OpClass.OPAQUE})
"""Operators that may do more than compute their results, and must not run a second time."""
COUNTED = 1e-3
"""A parameter's own error is reported if its gradient has at least this share of the norm of all."""

Gradients = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class GradientError:
    """How far gradients are from those without lossy codecs."""

    relative: float
    """|g' - g| / |g| over all parameters; infinite if g' is not finite."""
    largest: float = 0.0
    """The largest such error of a single parameter whose gradient is not negligible."""


def lossy_codec(op: Op) -> Codec | None:
    """Return the lossy codec whose encoder or decoder an operator is."""
    for codec in CODECS.values():
        if codec.lossless:
            continue
        if op.target is codec.encode and tuple(op.args[1:]) == codec.options:
            return codec
        if op.target is codec.decode and tuple(op.args[4:]) == codec.options:
            return codec
    return None


def why_unmeasurable(graph: Graph, primals: Sequence[Any]) -> str:
    """Return why the step cannot be run for a measurement; empty if it can."""
    if len(primals) != len(graph.primals) or any(primal is None for primal in primals):
        return "an input of the graph is created by PyTorch while it runs"
    if any(isinstance(primal, FakeTensor) for primal in primals):
        return "an estimate runs nothing"
    for op in graph.ops:
        if op.kind in UNREPEATABLE and not isinstance(op.target, StoreTo | LoadFrom):
            return f"operator {op.name} may not run twice"
    return ""


# -- the step without loss -------------------------------------------------------------------------------------------


def keep_copy(x: torch.Tensor, *options: Any) -> torch.Tensor:
    """Replaces an encoder or a store in an exact run: a copy, since later operators may write over `x`."""
    return x.clone()


def copy_back(kept: torch.Tensor, *layout: Any) -> torch.Tensor:
    """Replaces a decoder or a load: a copy, since there may be several."""
    return kept.clone()


def in_memory(schedule: Schedule, *, exact: bool) -> Schedule:
    """Return the schedule with offloaded values in memory and, if `exact`, with activations in place of their lossy
    codes."""
    ops = []
    for op in schedule.graph.ops:
        coded = lossy_codec(op) if exact else None
        if isinstance(op.target, StoreTo) or (coded is not None and op.target is coded.encode):
            op = dataclasses.replace(op, target=keep_copy)
        elif isinstance(op.target, LoadFrom) or coded is not None:
            op = dataclasses.replace(op, target=copy_back)
        ops.append(op)
    return dataclasses.replace(
        schedule,
        graph=dataclasses.replace(schedule.graph, ops=ops),
        forward=tuple(_without_transfers(schedule.graph, schedule.forward)),
        backward=tuple(_without_transfers(schedule.graph, schedule.backward)),
    )


def _without_transfers(graph: Graph, actions: Sequence[Action]) -> Iterator[Action]:
    for action in actions:
        if isinstance(action, Store):
            yield Run(action.op)
        elif isinstance(action, Wait):
            if isinstance(graph.ops[action.op].target, LoadFrom):
                yield Run(action.op)
        elif not isinstance(action, Load):
            yield action


def extra_bytes(graph: Graph) -> int:
    """The most bytes that an exact run in memory takes beyond the planned schedule."""
    return sum(
        graph.bytes_of(op.reads[0])
        for op in graph.ops
        if op.forward and (isinstance(op.target, StoreTo) or lossy_codec(op) is not None)
    )


def gradient_bytes(graph: Graph) -> int:
    return sum(graph.bytes_of(value) for value in graph.gradients if value is not None)


# -- runs ------------------------------------------------------------------------------------------------------------


def lower_in_memory(
    schedule: Schedule,
    *,
    exact: bool,
    kernels: Mapping[str, CompiledKernel] | None = None,
    watches: Mapping[int, Callable[..., Any]] | None = None,
) -> Lowered:
    """Compile the schedule to callables that use no tier; see `in_memory`."""
    return lower(in_memory(schedule, exact=exact), "measured", kernels, watches)


def run_gradients(
    graph: Graph, lowered: Lowered, primals: Sequence[Any], tangents: Sequence[torch.Tensor]
) -> Gradients:
    """Run a step and return its gradients. The states of generators are restored."""
    with torch.no_grad(), _draws_undone(graph, primals):
        made = lowered.forward(list(primals))
        saved = list(made[len(graph.outputs) :])
        del made
        saved += tangents
        return list(lowered.backward(saved))


@contextlib.contextmanager
def _draws_undone(graph: Graph, primals: Sequence[Any]) -> Iterator[None]:
    named = {
        id(argument): argument
        for op in graph.ops
        for argument in (*op.args, *op.kwargs.values(), getattr(op.target, "generator", None))
        if isinstance(argument, torch.Generator) and isinstance(op.target, DrawState | OpOverload)
    }
    states = [(generator, generator.get_state()) for generator in named.values()]
    try:
        with generators_kept():
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def random_tangents(graph: Graph) -> list[torch.Tensor]:
    """Gradients of the outputs: 1 for a loss, as in `loss.backward()`, and for any other output noise from a seed,
    scaled like the gradient of the mean over its elements."""
    made = []
    for number, value in enumerate(graph.values[tangent] for tangent in graph.tangents):
        assert value.storage is not None
        device = graph.storages[value.storage].device
        tangent = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device).fill_(1)
        if tangent.numel() > 1:
            generator = torch.Generator(device).manual_seed(number)
            noise = torch.empty(value.shape, dtype=torch.float32, device=device).normal_(generator=generator)
            tangent.copy_(noise.div_(tangent.numel()))
        made.append(tangent)
    return made


# -- comparison ------------------------------------------------------------------------------------------------------


def compare_gradients(graph: Graph, exact: Sequence[Any], lossy: Sequence[Any]) -> GradientError:
    """Return the error of gradients, which are in the order of the graph's; see the module."""
    parts: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for value, want, have in zip(graph.primals, exact, lossy, strict=True):
        if isinstance(want, torch.Tensor):
            parameter = graph.values[value].role is Role.PARAMETER
            parts[parameter].append((_norm(have - want), _norm(want)))
    relative = max((_relative(part) for part in parts.values() if part), default=0.0)
    own = parts[True] or parts[False]
    whole = math.hypot(*(size for _, size in own))
    counted = [(apart, size) for apart, size in own if size >= COUNTED * whole and size > 0]
    return GradientError(relative, max((apart / size for apart, size in counted), default=relative))


def _relative(parts: Sequence[tuple[float, float]]) -> float:
    apart, size = (math.hypot(*numbers) for numbers in zip(*parts, strict=True))
    if not math.isfinite(size):
        return math.nan  # nothing to compare with
    if not math.isfinite(apart):
        return math.inf
    return apart / size if size else (math.inf if apart else 0.0)


def _norm(tensor: torch.Tensor) -> float:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    wide = torch.float64 if not tensor.is_complex() else torch.complex128
    return float(torch.linalg.vector_norm(tensor, dtype=wide))
