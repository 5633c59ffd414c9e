"""Captured graphs of training steps: a model is compiled by `encore.compile`, and its graphs are returned."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import encore
from encore.api import compiled_call
from encore.compiler import CapturedGraph
from encore.graph import Graph, Op, Value


def train_step(function: Callable[..., Any], *args: Any) -> None:
    """Forward, and backward from a gradient of ones for every output; gradients are left in place."""
    outputs = [leaf for leaf in pytree.tree_leaves(function(*args)) if leaf.requires_grad]
    with gradients_for_all_outputs():
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


@contextlib.contextmanager
def gradients_for_all_outputs() -> Iterator[None]:
    """Backward through all outputs, whatever the first forward expected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was given gradients that no step before had")
        yield


def drop_gradients(model: nn.Module, args: Sequence[Any] = ()) -> None:
    for tensor in (*model.parameters(), *args):
        if isinstance(tensor, torch.Tensor):
            tensor.grad = None


def captured(model: Callable[..., Any], *args: Any, lowering: str = "eager", **options: Any) -> CapturedGraph:
    """The one graph of a training step, after that step has run; everything is kept unless an option says more."""
    if not {"budget", "overhead", "plan"}.intersection(options):
        options["overhead"] = 0.0
    compiled = encore.compile(model, lowering=lowering, **options)
    train_step(compiled, *args)
    session = compiled_call(compiled).session
    (graph,) = session.last_step
    (latest,) = [other for other in session.graphs if other.name == graph.name]  # planned for all outputs by now
    return latest


def captured_graph(model: Callable[..., Any], *args: Any) -> Graph:
    return captured(model, *args).plan.schedule.graph


def named(graph: Graph, name: str) -> Value:
    (value,) = [value for value in graph.values if value.name == name]
    return value


def operators(graph: Graph, target: Any) -> list[Op]:
    """Calls of one operator (an overload, or a packet for all of its overloads), in order."""
    return [op for op in graph.ops if target in (op.target, getattr(op.target, "overloadpacket", None))]


class Perceptron(nn.Module):
    """Two linear layers around a ReLU; the loss is the sum of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.leave = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.enter(x))
        return self.leave(hidden).sum()
