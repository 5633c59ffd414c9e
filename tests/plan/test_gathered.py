"""What is made of weights alone is never saved where weights are only there while they are used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from encore.graph import Graph
from encore.plan import without_saved_weights
from encore.plan.gathered import made_of_parameters
from encore.schedule import schedule_step
from support.captured_graphs import captured_graph


class ScaledWeights(nn.Module):
    """Two products with weights that are computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.ones(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scale * torch.tanh(self.weight)
        return torch.tanh(x @ weight.t().contiguous()).mm(weight).square().mean()


def saved_of_weights(graph: Graph) -> frozenset[int]:
    return made_of_parameters(graph).intersection(schedule_step(graph).saved)


def test_backward_makes_it_again() -> None:
    graph = captured_graph(ScaledWeights(), torch.randn(8, 32))
    assert saved_of_weights(graph)
    changed = without_saved_weights(graph, exact=True)
    assert not saved_of_weights(changed)
    assert len(changed.ops) > len(graph.ops)


def test_graphs_without_such_values_do_not_change() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    graph = captured_graph(model, torch.randn(4, 8))
    assert without_saved_weights(graph, exact=True) is graph
