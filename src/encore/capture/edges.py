"""A graph with the inputs and outputs of another one and no computation between them, for AOTAutograd.

AOTAutograd wraps what Encore runs into autograd: saving, tangents, outputs that are views, errors for a second
derivative. For that it only needs the inputs and outputs. So a joint graph that AOTAutograd has not traced comes with a
graph of a single call, which returns empty outputs, and empty gradients for the inputs that receive some.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class Output:
    """The facts about an output that AOTAutograd needs."""

    tensor: torch.Tensor
    requires_grad: bool
    is_view: bool
    """Of an intermediate, as autograd sees it."""


def edges_of(module: fx.GraphModule, outputs: Sequence[Output], gets_gradient: Sequence[bool]) -> fx.GraphModule:
    """Return a graph with the inputs of a Dynamo graph and these outputs; `gets_gradient` has a flag for each input."""
    graph = fx.Graph()
    sources = []
    for node in module.graph.find_nodes(op="placeholder"):
        sources.append(graph.placeholder(node.name))
        sources[-1].meta = dict(node.meta)
    made = graph.call_function(_between(outputs, gets_gradient), tuple(sources))
    graph.output(tuple(graph.call_function(operator.getitem, (made, position)) for position in range(len(outputs))))
    return fx.GraphModule(module, graph)


def _between(outputs: Sequence[Output], gets_gradient: Sequence[bool]) -> Callable[..., tuple[torch.Tensor, ...]]:
    class NothingBetween(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.inputs = [(tuple(source.shape), source.dtype, source.device) for source in inputs]
            made = tuple(_base(output) if output.is_view else _empty(output) for output in outputs)
            constant = (result for result, output in zip(made, outputs, strict=True) if not output.requires_grad)
            ctx.mark_non_differentiable(*constant)
            return made

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return tuple(
                torch.empty(shape, dtype=dtype, device=device) if gets else None
                for (shape, dtype, device), gets in zip(ctx.inputs, gets_gradient, strict=True)
            )

    def nothing_between(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = NothingBetween.apply(*inputs)
        return tuple(
            result.as_strided(output.tensor.shape, output.tensor.stride(), output.tensor.storage_offset())
            if output.is_view
            else result
            for result, output in zip(made, outputs, strict=True)
        )

    return nothing_between


def _empty(output: Output) -> torch.Tensor:
    like = output.tensor
    return torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device)


def _base(output: Output) -> torch.Tensor:
    """A tensor as large as the storage that the output is a view of."""
    like = output.tensor
    return torch.empty(like.untyped_storage().nbytes() // like.element_size(), dtype=like.dtype, device=like.device)
