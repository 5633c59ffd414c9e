"""What no strategy drops: what cannot be made again, or would come out differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from encore.graph import OpClass
from encore.plan.strategies import STRATEGIES, Forward
from support.captured_graphs import captured_graph, operators

aten = torch.ops.aten


def deep(*layers: Callable[[], nn.Module], count: int = 9) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), *(layer() for layer in layers)) for _ in range(count)))


def test_masks_of_dropout_are_kept() -> None:
    graph = captured_graph(deep(nn.Dropout), torch.randn(4, 8))
    drawn = {value for op in graph.ops if op.kind is OpClass.RANDOM for value in op.writes}
    assert len(drawn) == 9
    for strategy in STRATEGIES.values():
        assert not strategy(graph) & drawn


def test_batch_norm_runs_again_though_its_statistics_have_moved_on() -> None:
    """In training it normalises by the batch alone, and its new statistics are not taken a second time."""
    graph = captured_graph(deep(lambda: nn.BatchNorm1d(8), nn.Tanh), torch.randn(4, 8))
    norms = operators(graph, aten._native_batch_norm_legit_functional)
    assert len(norms) == 9
    for strategy in STRATEGIES.values():
        dropped = strategy(graph)
        assert any(value in dropped for op in norms for value in op.writes[:3])
        assert not dropped & {value for op in norms for value in op.writes[3:]}


def test_what_reads_an_input_that_is_written_to_is_kept() -> None:
    """The new contents are copied over the old ones when forward returns; a second run would read those."""

    class Counts(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))
            self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = torch.exp(self.scale * 2)
            self.scale.copy_(x[0])
            return self.leave(torch.tanh(torch.tanh(self.enter(x))) * old).sum()

    graph = captured_graph(Counts(), torch.randn(4, 8))
    (exp,) = [op for op in operators(graph, aten.exp) if op.forward]
    (scaled,) = [op for op in graph.ops if op.forward and exp.reads == op.writes]
    assert scaled.writes[0] not in Forward.of(graph).droppable
    assert exp.writes[0] in Forward.of(graph).droppable  # from what was kept, it can be made again


def test_results_of_the_step_are_kept() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = torch.tanh(x @ w)
        return y, F.relu(torch.tanh(y) @ w)

    graph = captured_graph(function, torch.randn(8, 8), torch.randn(8, 8, requires_grad=True))
    allowed = Forward.of(graph).droppable
    assert not allowed & set(graph.outputs)
    assert {op.writes[0] for op in operators(graph, aten.tanh)} - allowed == {graph.outputs[0]}
