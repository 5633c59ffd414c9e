"""One call as autograd sees it: the operators it runs, those of its vector-Jacobian product, and who gets a gradient.

This is AOTAutograd's joint trace of a single call. Unlike AOTAutograd it takes views of operands for what they are, and
it tells not the sum of an operand's gradients but every contribution, and when it arrives: autograd adds contributions
of different calls up one by one, and floating-point sums depend on their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from encore.capture import torch_private

Call = Callable[[Sequence[torch.Tensor]], Any]
"""Takes its tensor operands and returns tensors, in any nest of lists and tuples."""


class UntraceableCallError(Exception):
    """The call does more than compute new tensors from its operands."""


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a call returns."""

    node: fx.Node
    requires_grad: bool
    is_view: bool
    operand: int | None
    """The operand it is, where a call returns one as it came (`contiguous`, `dropout` with p=0)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A contribution to the gradient of an operand."""

    after: int
    """How many operators of the product have run by then."""
    operand: int
    gradient: fx.Node


@dataclass(frozen=True, slots=True)
class CallTrace:
    """The operators of a call and of its product, over placeholders for operands and tangents."""

    operands: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    results: Any
    """What the call returns, with a `Result` for every tensor."""
    arrivals: tuple[Arrival, ...]


def trace_call(
    call: Call, operands: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None] | None, mode: Any
) -> CallTrace:
    """Trace a call on fake operands; with `tangents`, one for each tensor it returns, its product too."""
    watch = _Watch(call, len(operands), tangents)
    given = [tangent for tangent in tangents or () if tangent is not None]
    graph = torch_private.trace_functional(watch.run, [*operands, *given], mode)
    placeholders = graph.find_nodes(op="placeholder")
    ran = [node for node in graph.nodes if node.op == "call_function"]
    if len(ran) + len(placeholders) + 1 != len(graph.nodes):
        raise UntraceableCallError("it holds tensors of its own")
    (end,) = graph.output_node().args
    results, arrived = end[: len(watch.results)], end[len(watch.results) :]
    before = sum(node <= watch.last_of_forward for node in ran)
    return CallTrace(
        operands=tuple(placeholders[: len(operands)]),
        tangents=tuple(placeholders[len(operands) :]),
        forward=tuple(ran[:before]),
        backward=tuple(ran[before:]),
        results=pytree.tree_unflatten(
            [Result(node, *facts) for node, facts in zip(results, watch.results, strict=True)], watch.structure
        ),
        arrivals=tuple(
            Arrival(sum(node <= last for node in ran[before:]), operand, gradient)
            for (last, operand), gradient in zip(watch.arrivals, arrived, strict=True)
        ),
    )


@dataclass(slots=True)
class _Watch:
    """Runs the call and its product, noting what the traced graph alone does not tell."""

    call: Call
    operands: int
    tangents: Sequence[torch.Tensor | None] | None
    results: list[tuple[bool, bool, int | None]] = field(default_factory=list)
    structure: Any = None
    last_of_forward: Any = None
    arrivals: list[tuple[fx.Node, int]] = field(default_factory=list)
    contributions: list[torch.Tensor] = field(default_factory=list)

    def run(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        operands = given[: self.operands]
        results, self.structure = pytree.tree_flatten(self.call(operands))
        if not results or not all(isinstance(result, torch.Tensor) for result in results):
            raise UntraceableCallError("it returns something else than tensors")
        if any(torch_private.was_written(operand) for operand in operands):
            raise UntraceableCallError("it writes to an operand")
        positions = {id(operand): position for position, operand in enumerate(operands)}
        self.results = [
            (result.requires_grad, result._base is not None, positions.get(id(result))) for result in results
        ]
        self.last_of_forward = torch_private.last_traced_node()
        if self.tangents is not None:
            self._differentiate(operands, results, given[self.operands :])
        return [*results, *self.contributions]

    def _differentiate(
        self, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> None:
        assert self.tangents is not None
        wanted = {
            torch.autograd.graph.get_gradient_edge(operand).node: position
            for position, operand in enumerate(operands)
            if operand.requires_grad
        }
        pairs = zip(results, self.tangents, strict=True)
        ends = [result for result, tangent in pairs if tangent is not None]
        for node in _reachable(ends):
            targets = [wanted.get(source) for source, _ in node.next_functions]
            if any(target is not None for target in targets):
                node.register_hook(self._noting(targets))
        differentiable = [operand for operand in operands if operand.requires_grad]
        torch.autograd.grad(ends, differentiable, given, allow_unused=True)

    def _noting(self, targets: Sequence[int | None]) -> Callable[[Any, Any], None]:
        def note(gradients: Sequence[torch.Tensor | None], _: Any) -> None:
            for target, gradient in zip(targets, gradients, strict=True):
                if target is not None and gradient is not None:
                    self.arrivals.append((torch_private.last_traced_node(), target))
                    self.contributions.append(gradient)

        return note


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
