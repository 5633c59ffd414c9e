"""The joint trace of one call: its operators, those of its vector-Jacobian product, and the gradients of its operands.

This is AOTAutograd's joint trace of a single call, with two differences: views of operands stay views, and instead of
the sum of an operand's gradients it has every contribution and when it arrives. Autograd adds the contributions of
different calls one by one, and floating-point sums depend on their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from encore.capture import torch_private
from encore.capture.layouts import TensorLayout
from encore.graph.torch_private import pytree

Call = Callable[[Sequence[torch.Tensor]], Any]
"""A function of tensor operands that returns tensors, in any nest of lists and tuples."""


class NotRepeatableError(Exception):
    """A call does more than compute new tensors from its operands, so it cannot be traced apart from its graph."""


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """The layout of a traced tensor, which must be known while tracing."""
    layout = TensorLayout.of(tensor)
    if tensor.dtype.is_complex or not {*map(type, layout.shape), *map(type, layout.stride)} <= {int}:
        raise NotRepeatableError("it has complex numbers, or sizes that depend on data")
    return layout


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a call returns."""

    node: fx.Node
    requires_grad: bool
    is_view: bool
    operand: int | None
    """The operand that is returned unchanged (`contiguous`, `dropout` with p=0), if it is one."""
    tangent: fx.Node | None
    """Its gradient, if the product was traced with one."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A contribution to the gradient of an operand."""

    operand: int
    gradient: fx.Node


@dataclass(frozen=True, slots=True)
class CallTrace:
    """The operators of a call and of its product."""

    operands: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node | Arrival, ...]
    """In the order of execution."""
    results: tuple[Result, ...]
    nest: Any
    """What the call returns, with the number of a result for every tensor."""


def trace_call(
    call: Call, operands: Sequence[torch.Tensor], mode: Any, tangents: Sequence[TensorLayout | None] | None = None
) -> CallTrace:
    """Trace a call on operands of a fake mode, and its product for gradients of these layouts, one for each tensor it
    returns (None: it receives no gradient). By default, gradients are laid out like the results."""
    recorder = _CallRecorder(call, tangents)
    graph = torch_private.trace_functional(recorder.run, operands, mode)
    placeholders, end = graph.find_nodes(op="placeholder"), graph.output_node()
    ran = [node for node in graph.nodes if node.op == "call_function"]
    if len(ran) + len(placeholders) + 1 != len(graph.nodes):
        raise NotRepeatableError("it has constant tensors")
    place = {node: position for position, node in enumerate(graph.nodes)}
    ran = [node for node in ran if not _only_detaches(node, end)]
    ran = [node for node in reversed(ran) if not _sums_contributions(node)][::-1]
    leaving = iter(pytree.arg_tree_leaves(*end.args))
    results = [next(leaving) for _ in recorder.results]
    given = [next(leaving) if comes else None for comes in recorder.gradient_comes]
    happens: list[tuple[int, fx.Node | Arrival]]
    happens = [(place[node], node) for node in ran if place[node] > place[recorder.last_tangent]]
    happens += [(place[last], Arrival(operand, next(leaving))) for last, operand in recorder.arrivals]
    happens.sort(key=lambda event: event[0])  # stable: an arrival stays after the operator before it
    return CallTrace(
        operands=tuple(placeholders),
        forward=tuple(node for node in ran if place[node] <= place[recorder.last_of_forward]),
        backward=tuple(event for _, event in happens),
        results=tuple(
            Result(node, *facts, tangent) for node, facts, tangent in zip(results, recorder.results, given, strict=True)
        ),
        nest=recorder.nest,
    )


def _only_detaches(node: fx.Node, end: fx.Node) -> bool:
    """Return whether a node only detaches a saved tensor; if so, replace it by the tensor itself."""
    if node.target is not torch.ops.aten.detach.default or end in node.users:
        return False
    (saved,) = node.all_input_nodes
    node.replace_all_uses_with(saved)
    return True


def _sums_contributions(node: fx.Node) -> bool:
    """Return whether a node is the unread sum of an operand's gradients; if so, erase it. `repeats.py` adds up the
    contributions of all calls."""
    if node.target is not torch.ops.aten.add.Tensor or node.users:
        return False
    node.graph.erase_node(node)
    return True


@dataclass(slots=True)
class _CallRecorder:
    """Runs the call and its product while they are traced, and records what the graph does not show."""

    call: Call
    layouts: Sequence[TensorLayout | None] | None
    nest: Any = None
    results: list[tuple[bool, bool, int | None]] = field(default_factory=list)
    gradient_comes: list[bool] = field(default_factory=list)
    last_of_forward: Any = None
    last_tangent: Any = None
    arrivals: list[tuple[fx.Node, int]] = field(default_factory=list)
    contributions: list[torch.Tensor] = field(default_factory=list)

    def run(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        returned, structure = pytree.tree_flatten(self.call(operands))
        results = list({id(leaf): leaf for leaf in returned if leaf is not None}.values())
        if not results or not all(isinstance(result, torch.Tensor) for result in results):
            raise NotRepeatableError("it returns something that is not a tensor")
        if any(torch_private.was_written(operand) for operand in operands):
            raise NotRepeatableError("it writes to an operand")
        numbers = {id(result): number for number, result in enumerate(results)}
        self.nest = pytree.tree_unflatten([numbers.get(id(leaf)) for leaf in returned], structure)
        positions = {id(operand): position for position, operand in enumerate(operands)}
        self.results = [
            (result.requires_grad, result._base is not None, positions.get(id(result))) for result in results
        ]
        self.last_of_forward = torch_private.last_traced_node()
        layouts = self.layouts or [_like(result) for result in results]
        self.gradient_comes = [layout is not None for layout in layouts]
        tangents = [layout.empty() for layout in layouts if layout is not None]
        self.last_tangent = torch_private.last_traced_node()
        self._differentiate(list(itertools.compress(results, self.gradient_comes)), operands, tangents)
        return [*results, *tangents, *self.contributions]

    def _differentiate(
        self, ends: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
    ) -> None:
        wanted = {
            torch.autograd.graph.get_gradient_edge(operand).node: position
            for position, operand in enumerate(operands)
            if operand.requires_grad
        }
        if not (ends and wanted):
            return
        for node in _reachable(ends):
            targets = [wanted.get(source) for source, _ in node.next_functions]
            if any(target is not None for target in targets):
                node.register_hook(self._record(targets))
        sources = [operand for operand in operands if operand.requires_grad]
        torch.autograd.grad(ends, sources, tangents, allow_unused=True)

    def _record(self, targets: Sequence[int | None]) -> Callable[[Any, Any], None]:
        def record(gradients: Sequence[torch.Tensor | None], _: Any) -> None:
            for target, gradient in zip(targets, gradients, strict=True):
                if target is not None and gradient is not None:
                    self.arrivals.append((torch_private.last_traced_node(), target))
                    self.contributions.append(gradient)

        return record


def _reachable(results: Sequence[torch.Tensor]) -> list[Any]:
    """Autograd's nodes behind the results."""
    found: dict[Any, None] = dict.fromkeys(result.grad_fn for result in results if result.grad_fn is not None)
    pending = list(found)
    while pending:
        for source, _ in pending.pop().next_functions:
            if source is not None and source not in found:
                found[source] = None
                pending.append(source)
    return list(found)


def _like(result: torch.Tensor) -> TensorLayout | None:
    """The layout of the gradient of a result; None for an operand that is returned unchanged, which is a leaf here."""
    return layout_of(result) if result.grad_fn is not None else None
