"""Each pass by itself: what it changes, that numbers and predicted peaks hold, that it can be skipped and declines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from encore.api import compiled_call
from encore.compiler import CapturedGraph
from encore.errors import OptionError
from encore.graph import verify_graph
from encore.options import FUSED_PASSES
from encore.rewrite import PASSES, Judge, rewrite
from encore.schedule import replay
from support.captured_graphs import captured, drop_gradients, operators, train_step
from support.rounding import assert_as_accurate

aten = torch.ops.aten
VERDICTS = ("transposed_pays", "stacking_pays", "stacking_gradients_pays", "merging_pays", "channels_last_pays")


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a rewrite pays is the machine's business; whether it is right is ours."""
    for verdict in VERDICTS:
        monkeypatch.setattr(Judge, verdict, lambda *_: True)


@pytest.fixture
def whatever_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps have no room for a pass that trades memory for speed: let it."""
    monkeypatch.setattr(
        "encore.compiler.forms.rewrite",
        lambda graph, judge, **settings: rewrite(graph, judge, **{**settings, "limit": 2**60}),
    )


class Unrolled(nn.Module):
    """Two recurrent layers written out, step by step; weights are shared by all steps."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.enter = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.stay = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [(x.new_zeros(x.shape[0], x.shape[2]), x.new_zeros(x.shape[0], x.shape[2])) for _ in range(2)]
        for step in x.unbind(1):
            below = step
            for layer, (enter, stay) in enumerate(zip(self.enter, self.stay, strict=True)):
                hidden, cell = states[layer]
                open_, forget, new, leave = (enter(below) + stay(hidden)).chunk(4, -1)
                cell = torch.sigmoid(forget) * cell + torch.sigmoid(open_) * torch.tanh(new)
                below = torch.sigmoid(leave) * torch.tanh(cell)
                states[layer] = (below, cell)
        return (states[-1][0] ** 2).sum()


class Siblings(nn.Module):
    """Queries, keys and values as three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.queries(x), torch.tanh(self.keys(x)), torch.sigmoid(self.values(x))
        return (torch.relu(queries) * keys + values).pow(2).sum()


class Convolutions(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.norm(self.first(x))))


def run(model: nn.Module, *args: Any, only: str = "") -> CapturedGraph:
    """The captured graph of a step with one pass (or all of them), after checking the step in every respect."""
    skip = tuple(name for name in FUSED_PASSES if only and name not in (*only.split(), "fuse"))
    reference, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    graph = captured(model, *args, lowering="fused", skip=skip)
    train_step(reference, *args)
    train_step(exact, *(arg.double() if arg.is_floating_point() else arg for arg in args))
    assert [p.grad.stride() for p in model.parameters() if p.grad is not None] == [
        p.grad.stride() for p in reference.parameters() if p.grad is not None
    ]
    truth = gradients(exact)
    allowed = 1.5 * float((gradients(reference) - truth).norm()) + 1e-6 * float(truth.norm())
    assert float((gradients(model) - truth).norm()) <= allowed
    verify_graph(graph.plan.schedule.graph)
    replay(graph.plan.schedule)
    return graph


def gradients(model: nn.Module) -> torch.Tensor:
    """All of them, end to end, in float64."""
    return torch.cat(
        [parameter.grad.double().flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def measured_peak(model: nn.Module, *args: Any) -> int:
    for _ in range(2):
        drop_gradients(model, args)
        measured = encore.measure(lambda: train_step(model, *args)).step_peak
    return measured


def loop() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Unrolled(), torch.randn(5, 8, 6)


def test_options_name_every_pass() -> None:
    assert ("recurrent", *PASSES, "split_head", "fuse") == FUSED_PASSES
    with pytest.raises(OptionError, match=r"'fold' is not a pass.*'fold_additions'"):
        encore.compile(nn.Linear(2, 2), skip="fold")


def test_additions_fold_into_products_and_take_over_memory() -> None:
    model, x = loop()
    graph = run(model, x, only="fold_additions")
    assert graph.rewrites == ("fold_additions",)
    before, after = graph.unplanned.schedule.graph, graph.plan.schedule.graph
    folded = len(operators(after, aten.addmm)) - len(operators(before, aten.addmm))
    assert folded == len(operators(before, aten.mm)) - len(operators(after, aten.mm)) > 20
    # All eight steps of the four weights add up in place: no addition the size of a weight is left.
    weights = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
    sums = [op for op in operators(after, aten.add) if after.values[op.writes[0] or 0].shape in weights]
    assert not sums


@pytest.mark.usefixtures("whatever_the_peak")
def test_projections_of_all_steps_are_hoisted() -> None:
    model, x = loop()
    graph = run(model, x, only="hoist_projections")
    assert graph.rewrites == ("hoist_projections",)
    after = graph.plan.schedule.graph
    rows = [after.values[op.writes[0] or 0].shape[0] for op in operators(after, aten.addmm)]
    assert rows == [8 * 5, 8 * 5]  # one product a layer, of eight steps with five rows each
    backward = [after.values[op.writes[0] or 0].shape for op in operators(after, aten.mm) if not op.forward]
    assert (8 * 5, 6) in backward  # what the first layer's input gradients of all steps come from


@pytest.mark.usefixtures("whatever_the_peak")
def test_weight_gradients_are_stacked() -> None:
    model, x = loop()
    graph = run(model, x, only="fold_additions stack_weight_gradients")
    assert graph.rewrites == ("fold_additions", "stack_weight_gradients")
    after = graph.plan.schedule.graph
    inner = [after.values[op.reads[-1]].shape for op in operators(after, aten.mm) if not op.forward]
    assert inner.count((8 * 5, 6)) == 4  # the gradient of each of the four weights is one product over all steps


def test_chunks_shrink_until_the_peak_is_no_higher() -> None:
    model, x = loop()
    graph = run(model, x, only="fold_additions stack_weight_gradients")
    assert graph.plan.timeline.step_peak <= graph.unplanned.timeline.step_peak


@pytest.mark.usefixtures("whatever_the_peak")
def test_weights_are_laid_out_transposed() -> None:
    model, x = loop()
    graph = run(model, x, only="transpose_weights")
    assert graph.rewrites == ("transpose_weights",)
    after = graph.plan.schedule.graph
    copies = {op.writes[0] for op in operators(after, aten.clone)}
    assert len(copies) == 4
    forward = [op for op in after.ops if op.forward and op.target in (aten.mm.default, aten.addmm.default)]
    assert all(op.reads[-1] in copies for op in forward)


@pytest.mark.usefixtures("whatever_the_peak")
def test_siblings_merge() -> None:
    torch.manual_seed(0)
    model, x = Siblings(), torch.randn(16, 8)
    graph = run(model, x, only="merge_siblings")
    assert graph.rewrites == ("merge_siblings",)
    before, after = graph.unplanned.schedule.graph, graph.plan.schedule.graph
    assert len([op for op in operators(before, aten.mm) if op.forward]) == 3
    assert len([op for op in operators(after, aten.mm) if op.forward]) == 1


@pytest.mark.usefixtures("whatever_the_peak")
@pytest.mark.parametrize("only", ["channels_last", "narrow_indices channels_last"])
def test_convolutions_get_their_channels_last(only: str) -> None:
    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(4, 3, 16, 16)
    eager = copy.deepcopy(model)
    graph = run(model, x, only=only)
    assert "channels_last" in graph.rewrites
    after = graph.plan.schedule.graph
    maps = [after.values[op.writes[0] or 0] for op in operators(after, aten.convolution)]
    assert all(value.stride[1] == 1 for value in maps)
    masks = [op.args[10] for op in operators(after, aten.convolution_backward)]
    assert not any(wants_input and wants_weight for wants_input, wants_weight, _ in masks)
    assert model(x).stride() == eager(x).stride()


@pytest.mark.usefixtures("whatever_the_peak")
def test_a_view_that_asks_for_channels_first_gets_a_copy() -> None:
    torch.manual_seed(0)
    model, x = Convolutions(between=lambda x: x.view(4, 8, -1).cumsum(-1).view(4, 8, 16, 16)), torch.randn(4, 3, 16, 16)
    assert "channels_last" in run(model, x, only="channels_last").rewrites


@pytest.mark.usefixtures("whatever_the_peak")
def test_a_flattened_map_gets_a_copy_with_channels_first() -> None:
    """`view` refuses such strides with a ValueError, other operators with a RuntimeError."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 4))
    assert "channels_last" in run(model, torch.randn(5, 2, 6, 6), only="channels_last").rewrites


@pytest.mark.usefixtures("whatever_the_peak")
def test_a_draw_sees_channels_first_and_makes_the_same_mask() -> None:
    torch.manual_seed(0)
    model = Convolutions(between=lambda x: F.dropout(torch.relu(x), 0.5))
    x = torch.randn(4, 3, 16, 16)
    compiled = encore.compile(copy.deepcopy(model), lowering="fused")
    torch.manual_seed(1)
    found = compiled(x)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert_as_accurate(found, expected, copy.deepcopy(model).double()(x.double()))
    (graph,) = compiled_call(compiled).session.last_step
    assert "channels_last" in graph.rewrites


def test_pooling_positions_are_kept_narrow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 7 * 7, 2))
    x = torch.randn(3, 1, 16, 16)
    graph = run(model, x, only="narrow_indices")
    assert graph.rewrites == ("narrow_indices",)
    kinds = {graph.plan.schedule.graph.values[value].dtype for value in graph.plan.schedule.saved}
    assert torch.int64 not in kinds
    assert torch.int16 in kinds  # a plane of 196 positions
    assert graph.plan.timeline.saved < graph.unplanned.timeline.saved


class Dropped(nn.Module):
    """Noise of several probabilities; once on a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.tanh(self.layers[0](x)), 0.1)
        x = F.dropout(torch.tanh(self.layers[1](x)).t(), 0.5)
        return F.dropout(self.layers[2](x.t()), 1 / 3).pow(2).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_keeps_a_byte_an_element_and_the_same_noise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Dropped().to(dtype), torch.randn(40, 40, dtype=dtype)
    reference = copy.deepcopy(model)
    skip = tuple(name for name in FUSED_PASSES if name != "narrow_masks")  # not even kernels: to the last bit
    torch.manual_seed(1)
    graph = captured(model, x, lowering="fused", skip=skip)
    following = torch.rand(3)
    torch.manual_seed(1)
    train_step(reference, x)
    assert torch.equal(torch.rand(3), following)
    assert torch.equal(gradients(model), gradients(reference))
    assert graph.rewrites == ("narrow_masks",)
    verify_graph(graph.plan.schedule.graph)
    replay(graph.plan.schedule)
    saved = graph.plan.schedule.graph.values
    assert [saved[value].dtype for value in graph.plan.schedule.saved].count(torch.bool) == 3
    noise = 3 * 40 * 40 * (dtype.itemsize - 1)
    assert graph.plan.timeline.saved == graph.unplanned.timeline.saved - noise


MANY_STEPS = ("", "hoist_projections")
"""Passes that change this loop the most; the others are tried in `make test-all`."""


@pytest.mark.parametrize(
    "only",
    [
        pytest.param(name, marks=() if name in MANY_STEPS else pytest.mark.slow)
        for name in ("", *FUSED_PASSES)
        if name != "fuse"
    ],
)
def test_predicted_peak_is_the_measured_one(only: str) -> None:
    model, x = loop()
    skip = tuple(name for name in FUSED_PASSES if only and name not in (only, "fuse"))
    compiled = encore.compile(model, lowering="fused", skip=skip)
    measured = measured_peak(compiled, x)
    predicted = encore.report(compiled).planned.step_peak
    assert measured <= predicted <= 1.01 * measured


def test_nothing_is_done_where_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    for verdict in VERDICTS:
        monkeypatch.setattr(Judge, verdict, lambda *_: False)
    torch.manual_seed(0)
    no_verdict = ("split_convolutions",)  # stays wherever it fits, which oneDNN decides
    graph = captured(Convolutions(), torch.randn(2, 3, 8, 8), lowering="fused", skip=no_verdict)
    assert graph.rewrites == ()
    assert graph.plan.schedule.graph is graph.unplanned.schedule.graph


@pytest.mark.slow
def test_the_judge_measures_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    model, x = loop()
    captured(model, x, lowering="fused")
    (kept,) = tmp_path.glob("measurements-*.json")
    assert "rewrite" in kept.read_text()
    monkeypatch.setattr("encore.rewrite.judge._ratio", lambda *_: pytest.fail("measured again"))
    captured(Unrolled(), x, lowering="fused")
