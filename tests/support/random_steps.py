"""Small training steps drawn at random, and costs that depend on nothing but the graph: for plans that can be checked
against everything there is."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

from encore.graph import Graph, Op, OpClass
from encore.plan.plan import Plan, keep_everything
from encore.schedule import Fused
from support.captured_graphs import captured


class ByBytes:
    """Costs that depend on nothing but the graph: a heavy operator costs ten times what it moves."""

    def __call__(self, graph: Graph, op: Op | Fused, over: int | None = None) -> float:
        assert isinstance(op, Op)
        moved = sum(graph.values[value].bytes for value in {*op.reads, *op.writes} if value is not None)
        return 1e-9 * moved * (10 if op.kind is OpClass.HEAVY else 0 if op.kind is OpClass.VIEW else 1)

    def inside(self, graph: Graph, op: Op) -> float:
        return self(graph, op)


def no_workspace(graph: Graph, op: Op | Fused) -> int:
    return 0


def random_step(seed: int) -> Callable[..., torch.Tensor]:
    """A few layers, drawn: products, cheap functions, residual branches."""
    draw = random.Random(seed)
    later = ["mm", "tanh", "sigmoid", "residual", "scale", "gelu"]
    kinds = ["mm", *(draw.choice(later) for _ in range(draw.randint(2, 5)))]

    def step(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for kind, weight in zip(kinds, weights, strict=False):
            if kind == "mm":
                x = x @ weight
            elif kind == "residual":
                x = x + torch.tanh(x @ weight)
            elif kind == "scale":
                x = x * torch.exp(x)
            else:
                x = getattr(torch, kind)(x) if kind != "gelu" else nn.functional.gelu(x)
        return x.square().sum()

    return step


def kept_step(seed: int) -> Plan:
    torch._dynamo.reset()
    x = torch.randn(256, 16)
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(6)]
    return keep_everything(captured(random_step(seed), x, *weights).unplanned.schedule.graph, no_workspace)
