"""A step after one pass, compared with the same step without it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import encore
from encore.compiler import CapturedGraph
from encore.graph import verify_graph
from encore.options import FUSED_PASSES
from encore.schedule import replay
from support.captured_graphs import captured, drop_gradients, train_step


def all_but(name: str) -> tuple[str, ...]:
    """What to skip for one pass to be alone."""
    return tuple(other for other in FUSED_PASSES if other != name)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([one.grad.double().flatten() for one in model.parameters() if one.grad is not None])


def checked(model: nn.Module, *args: Tensor, skip: tuple[str, ...]) -> CapturedGraph:
    """The captured step, after comparing its gradients with float64 and its peak with the allocator's."""
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    graph = captured(model, *args, lowering="fused", skip=skip)
    train_step(eager, *args)
    train_step(exact, *(arg.double() if arg.is_floating_point() else arg for arg in args))
    truth = gradients(exact)
    allowed = 1.5 * float((gradients(eager) - truth).norm()) + 1e-6 * float(truth.norm())
    assert float((gradients(model) - truth).norm()) <= allowed
    verify_graph(graph.plan.schedule.graph)
    replay(graph.plan.schedule)
    drop_gradients(model)
    assert graph.plan.timeline.step_peak == encore.measure(lambda: train_step(model, *args)).step_peak
    return graph
