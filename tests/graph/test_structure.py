"""Structures of graphs: equal for other sizes, and different where anything else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encore.graph import Graph
from encore.graph.structure import structure_key, structure_of
from support.captured_graphs import captured


class Words(nn.Module):
    """Classes of words, with the mean of their squared activations."""

    def __init__(self, kind: type[nn.Module] = nn.GELU, eps: float = 1e-5) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.inner = nn.Sequential(nn.Linear(12, 10), kind(), nn.LayerNorm(10, eps=eps))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inner(self.words(x))
        return F.cross_entropy(h.flatten(0, 1), y.flatten()) + h.square().mean()


def graph_of(function: Callable[..., Tensor], *args: Tensor) -> Graph:
    torch._dynamo.reset()
    return captured(function, *args).unplanned.schedule.graph


def words(rows: int, length: int, model: nn.Module | None = None) -> Graph:
    x, y = torch.randint(50, (rows, length)), torch.randint(10, (rows, length))
    return graph_of(model or Words(), x, y)


def test_graphs_of_other_sizes_have_the_same_structure() -> None:
    first, second, third = words(3, 7), words(3, 13), words(5, 7)
    assert structure_key(first) == structure_key(second) == structure_key(third)
    assert structure_of(first).key == structure_of(second).key == structure_of(third).key
    assert structure_of(first).sizes != structure_of(second).sizes
    assert [op.target for op in first.ops] == [op.target for op in second.ops]


def test_a_batch_of_one_broadcasts_and_is_another_structure() -> None:
    assert structure_of(words(1, 7)).key != structure_of(words(3, 7)).key


@pytest.mark.parametrize("other", [Words(nn.ReLU), Words(eps=1e-6), Words().double()], ids=["operator", "eps", "dtype"])
def test_another_model_is_another_structure(other: nn.Module) -> None:
    assert structure_of(words(3, 7)).key != structure_of(words(3, 7, other)).key
    assert structure_key(words(3, 7)) != structure_key(words(3, 7, other))


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "factor": (lambda x: (x * 3.5).sum(), lambda x: (x * 2.5).sum()),
    "dimension": (lambda x: x.sum(0).tanh().sum(), lambda x: x.sum(2).tanh().sum()),
    "index": (lambda x: x[:, 2].tanh().sum(), lambda x: x[:, 3].tanh().sum()),
    "padding": (lambda x: F.max_pool1d(x, 3, padding=0).sum(), lambda x: F.max_pool1d(x, 3, padding=1).sum()),
    "wiring": (lambda x: (x.tanh() * x.exp()).sum(), lambda x: (x.tanh() * x.tanh().exp()).sum()),
    "layout": (lambda x: x.mT.contiguous().tanh().sum(), lambda x: x.mT.tanh().sum()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_literal_is_another_structure(name: str) -> None:
    x = torch.randn(5, 7, 9, requires_grad=True)
    one, other = (structure_key(graph_of(function, x)) for function in FUNCTIONS[name])
    assert one != other


def test_a_divisor_that_is_a_size_is_no_literal() -> None:
    graphs = [graph_of(lambda x: x.tanh().mean((1, 2)).sum(), torch.randn(3, n, 5, requires_grad=True)) for n in (7, 9)]
    assert structure_key(graphs[0]) == structure_key(graphs[1])


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 4)

    def forward(self, xs: Tensor) -> Tensor:
        h, states = xs.new_zeros(len(xs), 4), []
        for step in range(xs.shape[1]):
            h = torch.tanh(self.cell(torch.cat([xs[:, step], h], 1)))
            states.append(h)
        return torch.stack(states).square().sum()


def test_unrolled_loops_have_one_key_for_every_number_of_steps() -> None:
    graphs = [graph_of(Unrolled(), torch.randn(3, steps, 2)) for steps in (5, 9)]
    assert structure_of(graphs[0]).key == structure_of(graphs[1]).key
    assert structure_key(graphs[0]) != structure_key(graphs[1])


def test_how_near_sizes_are() -> None:
    small, middle, large = (structure_of(words(3, length)) for length in (4, 12, 48))
    assert small.is_near(middle, 3.0)
    assert not small.is_near(middle, 2.9)
    assert not small.is_near(large, 4.0)
    assert small.distance(middle) < small.distance(large)
