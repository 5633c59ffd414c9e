"""Gradients that are larger than their operands are made last: order, bytes and bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import encore
from encore.compiler import CapturedGraph
from encore.graph import Graph, Value, verify_graph
from encore.rewrite import postpone_gradients
from encore.rewrite.postpone_gradients import FEW
from encore.schedule import replay
from support.captured_graphs import captured, drop_gradients, train_step
from support.single_pass import all_but, checked

ALONE = all_but("postpone_gradients")
A_LITTLE = 1e-6
"""An overhead that keeping everything does not use up: the passes run, and hardly anything is computed again."""
MIB = 1 << 20


class Classifier(nn.Module):
    """A map of 8 MiB, pooled, into a wide layer of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 32, 1)
        self.wide = nn.Linear(32 * 16, 2048)
        self.last = nn.Linear(2048, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.tanh(self.look(x))
        return self.last(torch.tanh(self.wide(nn.functional.avg_pool2d(maps, 32).flatten(1))))


def pictures(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 128, 128, generator=torch.Generator().manual_seed(1))


def bitwise(model: nn.Module, *args: Tensor) -> CapturedGraph:
    """The step in the eager lowering with this pass alone, whose gradients must be eager's."""
    eager = copy.deepcopy(model)
    train_step(eager, *args)
    graph = captured(model, *args, skip=ALONE, overhead=A_LITTLE)
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)
    verify_graph(graph.plan.schedule.graph)
    replay(graph.plan.schedule)
    drop_gradients(model)
    assert graph.plan.timeline.step_peak == encore.measure(lambda: train_step(model, *args)).step_peak
    return graph


def made_last(graph: Graph) -> Value:
    """The gradient of which nobody makes another after it."""
    makers = {graph.values[value].producer or 0: value for value in graph.gradients if value is not None}
    return graph.values[makers[max(makers)]]


def test_a_wide_layers_gradient_comes_last() -> None:
    torch.manual_seed(0)
    graph = bitwise(Classifier(), pictures())
    assert graph.rewrites == ("postpone_gradients",)
    step = graph.plan.schedule.graph
    assert made_last(step).shape == (2048, 512)


def test_it_takes_the_gradient_off_the_peak() -> None:
    """Backward's largest moment is at the map, and the gradient of 4 MiB is not there yet; its operands are."""
    torch.manual_seed(0)
    model, x = Classifier(), pictures()
    before = captured(copy.deepcopy(model), x, skip=(*ALONE, "postpone_gradients"), overhead=A_LITTLE)
    after = captured(model, x, skip=ALONE, overhead=A_LITTLE)
    operands = 4 * 4 * 512 + 4 * 4 * 2048
    assert before.plan.timeline.step_peak - after.plan.timeline.step_peak == 4 * MIB - operands


def test_fused() -> None:
    torch.manual_seed(0)
    assert checked(Classifier(), pictures(), skip=ALONE).rewrites == ("postpone_gradients",)


@pytest.mark.parametrize("rows", [256, 4096])
def test_many_rows_stay_where_they_are(rows: int) -> None:
    """A batch that takes more than a quarter of the weight's bytes."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 4))
    assert bitwise(model, torch.randn(rows, 512)).rewrites == ()


def test_small_gradients_stay_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(256, 1023), nn.Tanh(), nn.Linear(1023, 4))
    assert FEW > 4 * 256 * 1023
    assert bitwise(model, torch.randn(2, 256)).rewrites == ()


class Twice(nn.Module):
    """One wide weight, used twice: its gradient is a sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(torch.tanh(self.wide(x))))


def test_a_sum_of_products_moves_as_a_whole() -> None:
    torch.manual_seed(0)
    graph = bitwise(Twice(), torch.randn(2, 1024))
    assert graph.rewrites == ("postpone_gradients",)
    kinds = [op.target for op in graph.plan.schedule.graph.ops[-6:]]
    assert kinds.count(torch.ops.aten.mm.default) == 2, "both products, and what adds them up"


class Powers(nn.Module):
    """The gradient of a weight is a product times the weight's exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 1024) / 32)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.exp()).tanh()


def test_a_gradient_of_large_operands_stays_where_it_is() -> None:
    """What makes it reads a value as large as it is: holding that until the end would gain nothing."""
    torch.manual_seed(0)
    assert bitwise(Powers(), torch.randn(2, 512)).rewrites == ()


def test_nothing_to_postpone_is_the_same_graph() -> None:
    graph = captured(nn.Linear(4, 4), torch.randn(2, 4)).plan.schedule.graph
    assert postpone_gradients.apply(graph) is graph


def test_names_survive() -> None:
    """The graph is reordered, not rebuilt: the same operators with the same values."""
    torch.manual_seed(0)
    plain = captured(Classifier(), pictures()).plan.schedule.graph
    moved = postpone_gradients.apply(plain)
    assert sorted(op.name for op in moved.ops) == sorted(op.name for op in plain.ops)
    assert [value.name for value in moved.values] == [value.name for value in plain.values]
    assert made_last(plain).shape[0] == 32, "the first layer's"
    assert made_last(moved).shape == (2048, 512)
