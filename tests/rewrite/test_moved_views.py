"""Views move with what they read: a rewrite that lets a view read another value leaves it in that value's storage."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import encore
from encore.errors import IllegalGraphError
from encore.graph import Graph, OpClass, verify_graph
from encore.graph.editor import Editor
from encore.graph.values import Ref
from encore.rewrite import PASSES, Judge
from support.captured_graphs import captured, drop_gradients, train_step
from support.single_pass import gradients


@pytest.fixture(autouse=True)
def _every_rewrite_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs must not depend on how fast this machine is."""
    monkeypatch.setattr(Judge, "channels_last_pays", lambda *_: True)


def assert_right(model: nn.Module, *args: Tensor, within: float = 1.01, **options: Any) -> tuple[str, ...]:
    """Gradients as close to float64 as eager's are, and a peak as predicted; returns the passes that ran."""
    torch._dynamo.reset()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    graph = captured(model, *args, lowering="fused", **options)
    train_step(eager, *args)
    train_step(exact, *(arg.double() for arg in args))
    truth = gradients(exact)
    allowed = 1.5 * float((gradients(eager) - truth).norm()) + 1e-6 * float(truth.norm())
    assert float((gradients(model) - truth).norm()) <= allowed
    drop_gradients(model)
    measured = encore.measure(lambda: train_step(model, *args)).step_peak
    assert measured <= graph.plan.timeline.step_peak <= within * measured
    verify_graph(graph.plan.schedule.graph)
    return graph.rewrites


class Convolutions(nn.Module):
    """Two convolutions; what reads their result is each test's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.left, self.right = nn.Linear(32 * 256, 8), nn.Linear(32 * 256, 8)

    def maps(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class TwoHeads(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        flat = self.maps(x).flatten(1)
        return self.left(flat).pow(2).mean() + self.right(torch.sigmoid(flat)).pow(2).mean()


class ViewsOfViews(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.maps(x).flatten(1).view(-1, 2, 16 * 256)
        one, other = rows.chunk(2, 1)
        flat = rows.flatten(1)
        return self.left(flat).pow(2).mean() + self.right(torch.tanh(flat)).mean() + (one.exp() * other).mean()


class Strided(Convolutions):
    """Looks at the maps by their places in memory: in another layout, other elements are there."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        part = maps.as_strided((8, 32), (32 * 256, 1), 5)
        return self.left(maps.flatten(1)).pow(2).mean() + part.exp().mean()


def test_as_strided_finds_the_elements_it_names_with_channels_last() -> None:
    torch.manual_seed(0)
    within = 1.03  # eager allocates a little less for the gradient of as_strided than its fake kernel says
    assert "channels_last" in assert_right(Strided(), torch.randn(8, 8, 16, 16), within=within)


@pytest.mark.parametrize("model", [TwoHeads, ViewsOfViews])
def test_views_of_maps_with_channels_last(model: type[Convolutions]) -> None:
    torch.manual_seed(0)
    assert "channels_last" in assert_right(model(), torch.randn(8, 8, 16, 16))


class WeightNormalised(nn.Module):
    """The gradient of a weight is laid out as its convolution's input."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = parametrizations.weight_norm(nn.Conv2d(3, 16, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).pow(2).mean()


class GroupNormalised(Convolutions):
    """Group normalisation's backward is given a gradient with channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(self.norm(self.maps(x)).flatten(1)).pow(2).mean()


class Segmenting(Convolutions):
    """A loss of every pixel, whose backward kernel accepts contiguous scores alone."""

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.maps(x), x.sum(1).abs().long() % 32)


class AttendingToPlaces(Convolutions):
    """The attention kernel reads rows as if they were dense."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.maps(x).view(8, 4, 8, 256)
        return F.scaled_dot_product_attention(rows, rows, rows).pow(2).mean()


@pytest.mark.parametrize("model", [WeightNormalised, GroupNormalised, Segmenting, AttendingToPlaces])
def test_operators_that_want_the_layout_they_were_captured_with(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    channels = 3 if model is WeightNormalised else 8
    assert "channels_last" in assert_right(model(), torch.randn(8, channels, 16, 16))


class ConvolutionsBeforeLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.lstm = nn.LSTM(32 * 16, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        steps, _ = self.lstm(maps.permute(0, 3, 1, 2).flatten(2))
        return steps.pow(2).mean()


def test_the_peak_of_a_recurrent_layer_that_reads_maps() -> None:
    torch.manual_seed(0)
    assert "channels_last" not in assert_right(ConvolutionsBeforeLSTM(), torch.randn(4, 1, 16, 48))  # lifts the peak


class MaskedUnpooling(nn.Module):
    """The mask of a ReLU moves before an unpooling; its result was read by a view and by a pointwise operator."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.beside = nn.Linear(32, 8 * 64), nn.Linear(32, 8 * 64)
        self.leave = nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.enter(x).view(-1, 8, 8, 8)
        gate = torch.tanh(self.beside(x)).view(-1, 8, 8, 8).clone().sin()
        pooled = F.max_pool2d(torch.relu(rows + gate), 2)
        return self.leave(pooled.flatten(1)).pow(2).mean()


@pytest.mark.parametrize("lowering", ["eager", "fused"])
def test_views_of_a_gradient_that_is_masked_earlier(lowering: str) -> None:
    torch.manual_seed(0)
    model, x = MaskedUnpooling(), torch.randn(32, 32)
    graph = captured(model, x, lowering=lowering, budget="min")
    assert "mask_before_unpooling" in graph.rewrites
    assert encore.verify(model, x)
    drop_gradients(model)
    assert encore.measure(lambda: train_step(model, x)).step_peak <= graph.plan.timeline.step_peak


class Unrolled(nn.Module):
    """Products that are stacked, each read by its place in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for part in x.unbind(0):
            seen = self.enter(part)
            h = torch.tanh(seen + self.again(h)) + seen.as_strided((3, 1), (16, 1), 5)
        return h.pow(2).mean()


def test_as_strided_finds_the_elements_it_names_in_a_stacked_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "stacking_pays", lambda *_: True)
    torch.manual_seed(0)
    assert "hoist_projections" in assert_right(Unrolled(), torch.randn(8, 3, 16), within=1.5)


def test_a_pass_that_makes_an_illegal_graph_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(graph: Graph, judge: Judge) -> Iterator[Graph]:
        editor = Editor(graph)
        editor.graph.values[-1].storage = None
        editor.changed = True
        yield editor.finish()

    monkeypatch.setitem(PASSES, "fold_additions", corrupt)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="the pass fold_additions is left out, because it made an illegal graph"):
        graph = captured(TwoHeads(), torch.randn(8, 8, 16, 16), lowering="fused")
    assert "fold_additions" not in graph.rewrites
    monkeypatch.setenv("ENCORE_CHECK", "1")
    torch._dynamo.reset()
    with pytest.raises(IllegalGraphError):
        captured(TwoHeads(), torch.randn(8, 8, 16, 16), lowering="fused")


def graph_with_views() -> Graph:
    torch._dynamo.reset()
    return captured(TwoHeads(), torch.randn(8, 8, 16, 16)).unplanned.schedule.graph


def test_an_editor_moves_views_and_views_of_views() -> None:
    graph = graph_with_views()
    view = next(op for op in graph.ops if op.kind is OpClass.VIEW and op.forward and graph.producer(op.reads[0]))
    (old,), (seen,) = view.reads, view.writes
    assert seen is not None
    editor = Editor(graph)
    copy_ = editor.op_before(view, "copy", torch.ops.aten.clone.default, (Ref(old),))
    value = graph.values[old]
    assert value.dtype is not None
    made = editor.result(copy_, value.shape, value.dtype, "cpu")
    editor.read_instead(view, old, made)
    after = editor.finish()
    verify_graph(after)
    assert after.values[seen].storage == after.values[made].storage != after.values[old].storage


def test_an_editor_rejects_a_view_that_would_be_laid_out_otherwise() -> None:
    graph = graph_with_views()
    view = next(op for op in graph.ops if op.target is torch.ops.aten.t.default)
    (old,) = view.reads
    editor = Editor(graph)
    copy_ = editor.op_before(view, "copy", torch.ops.aten.clone.default, (Ref(old),))
    value = graph.values[old]
    assert value.dtype is not None
    made = editor.result(copy_, value.shape, value.dtype, "cpu")
    editor.graph.values[made].stride = (1, value.shape[0])
    editor.read_instead(view, old, made)
    with pytest.raises(IllegalGraphError, match="a rewrite lays out"):
        editor.finish()
