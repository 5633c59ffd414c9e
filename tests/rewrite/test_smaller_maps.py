"""What backward needs less of is kept smaller: what each pass saves, to the byte, and that no bit of a gradient moves.

Everything runs in the eager lowering, whose promise is eager's very bits: compared are bit patterns, signs of zeros
included, on inputs with NaNs, infinities and ties.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import encore
from encore.api import compiled_call
from encore.compiler import CapturedGraph
from encore.graph import verify_graph
from encore.options import FUSED_PASSES
from encore.rewrite import pool_maps, read_kept, sign_bits, split_convolutions
from encore.rewrite.passes import EXACT, rewrite
from encore.schedule import Run, replay
from support.captured_graphs import captured, operators
from support.rounding import assert_all_as_accurate

aten, own = torch.ops.aten, torch.ops.encore
Function = Callable[[torch.Tensor], torch.Tensor]
A_LITTLE = 1e-6
"""An overhead that keeping everything does not use up: the passes run, and hardly anything is computed again."""


class Apply(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class SideBySide(nn.Module):
    """Two looks at a map, laid side by side."""

    def __init__(self, activation: Function) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(4, 3, 1), nn.Conv2d(4, 5, 3, padding=1)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.activation(self.one(x)), self.activation(self.three(x))], 1)


def network(activation: Function, *then: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Apply(activation), *then)


def pictures(odd: bool = True) -> torch.Tensor:
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    if odd:
        x[0, 0, 3, 4], x[1, 1, 5, 5] = float("nan"), float("inf")
        x[2, :, :7, :7] = 0  # windows of nothing but equal numbers
    return x


def step(model: Callable[..., torch.Tensor], parameters: Any, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    torch.manual_seed(2)
    output = model(leaf)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(3)))
    return [output.detach(), leaf.grad, *(parameter.grad for parameter in parameters)]  # type: ignore[list-item]


def same_patterns(have: torch.Tensor, want: torch.Tensor) -> bool:
    """The same bits; of NaN there may be several."""
    either = (have.contiguous().view(torch.int32) == want.contiguous().view(torch.int32)) | (
        have.isnan() & want.isnan()
    )
    return bool(either.all())


def rewritten(model: nn.Module, x: torch.Tensor | None = None, **options: Any) -> CapturedGraph:
    """The step of the model's copy after the passes, checked against eager bit by bit."""
    x = pictures() if x is None else x
    twin, eager = copy.deepcopy(model), copy.deepcopy(model)
    if "plan" not in options and "budget" not in options:
        options.setdefault("overhead", A_LITTLE)
    compiled = encore.compile(twin, lowering="eager", **options)
    want = step(eager, eager.parameters(), x)
    have = step(compiled, twin.parameters(), x)
    for number, (mine, its) in enumerate(zip(have, want, strict=True)):
        assert same_patterns(mine, its), f"tensor {number} of the step"
    (graph,) = compiled_call(compiled).session.last_step
    verify_graph(graph.plan.schedule.graph)
    replay(graph.plan.schedule)
    assert graph.plan.timeline.step_peak <= graph.unplanned.timeline.step_peak
    return graph


def crossing(graph: CapturedGraph) -> dict[str, tuple[torch.dtype | None, int]]:
    """What the step itself made and keeps for backward: names, types, bytes."""
    step_graph = graph.plan.schedule.graph
    held = step_graph.external | {step_graph.values[value].storage for value in step_graph.returned}
    values = [step_graph.values[value] for value in graph.plan.schedule.saved]
    return {value.name: (value.dtype, value.bytes) for value in values if value.storage not in held}


MAP = 4 * 4 * 14 * 14
"""Elements of the first layer's result."""

ACTIVATIONS: dict[str, Function] = {
    "relu": torch.relu,
    "relu_": lambda x: F.relu(x, inplace=True),
    "relu6": F.relu6,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "falling": lambda x: F.leaky_relu(x, -0.2),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "where": lambda x: torch.where(x > 0, x, 0.5 * x),
    "hardsigmoid": F.hardsigmoid,
    "threshold": lambda x: F.threshold(x, 0.1, 0.05),
    "jump": lambda x: F.threshold(x, 0.1, 20.0),
    "maximum": lambda x: torch.maximum(x, 0.1 - x),
}
BOOLEANS = {"relu", "relu_", "leaky", "falling", "clamp_min", "clamp", "hardsigmoid", "threshold", "jump"}
"""Those of which backward asks one question."""


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_signs_are_kept_as_booleans(name: str) -> None:
    model = network(ACTIVATIONS[name], nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * 49, 3))
    graph = rewritten(model)
    if name in BOOLEANS:
        pooled = 4 * 4 * 7 * 7
        assert set(crossing(graph).values()) == {(torch.bool, MAP), (torch.float32, 4 * pooled)}
        assert {"read_sizes", "sign_masks"} <= set(graph.rewrites)


def test_hardtanh_keeps_two_booleans_and_is_pytorchs_about_nan() -> None:
    """Its kernel stops gradients at NaN in its vector loop, and lets them through behind its end."""
    model = network(F.relu6, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * 4 * 3, 3))
    x = torch.randn(3, 3, 11, 9, generator=torch.Generator().manual_seed(1)) * 3
    x[0, 0, 3, 3] = x[-1, 0, -1, -1] = float("nan")
    graph = rewritten(model, x)
    map_, pooled = 3 * 4 * 9 * 7, 3 * 4 * 4 * 3
    assert sorted(crossing(graph).values(), key=str) == [
        (torch.bool, map_), (torch.bool, map_), (torch.float32, 4 * pooled),
    ]  # fmt: skip
    assert "sign_masks" in graph.rewrites


@pytest.mark.parametrize("bounds", [(0.0, 0.0), (2.0, -1.0), (float("-inf"), float("inf"))])
def test_hardtanh_with_nothing_between_or_no_ends(bounds: tuple[float, float]) -> None:
    low, high = bounds
    model = network(lambda x: torch.ops.aten.hardtanh(x, low, high), nn.AvgPool2d(2), nn.Conv2d(4, 2, 1))
    graph = rewritten(model)
    assert ("sign_masks" in graph.rewrites) is (low < 0 < high)


@pytest.mark.parametrize(("threshold", "holds"), [(0.125, True), (0.1, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_constants_that_a_narrow_type_cannot_hold(threshold: float, holds: bool, dtype: torch.dtype) -> None:
    """PyTorch's formulas compare in float32, where the number next to the constant is another one."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.threshold(x + x, threshold, 20.0).sum()

    x = (torch.full((64, 64), threshold) / 2 * torch.tensor([1.0, 1.01, 0.99, 1.25])[:, None].repeat(16, 1)).to(dtype)
    compiled = encore.compile(function, lowering="eager", overhead=A_LITTLE)
    gradients = []
    for one in (function, compiled):
        leaf = x.clone().requires_grad_()
        one(leaf).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    (graph,) = compiled_call(compiled).session.last_step
    assert ("sign_masks" in graph.rewrites) is holds


@pytest.mark.parametrize(("name", "maps"), [("relu", 1), ("relu6", 1), ("leaky", 1), ("threshold", 1), ("jump", 1.25)])
def test_what_came_out_serves_where_it_is_kept(name: str, maps: float) -> None:
    """The second convolution keeps the activation's result; backward of the activation reads that, or a mask."""
    graph = rewritten(network(ACTIVATIONS[name], nn.Conv2d(4, 4, 3)))
    assert sum(size for _, size in crossing(graph).values()) == 4 * MAP * maps


def test_relu_before_a_pool_is_masked_by_what_came_out_of_it() -> None:
    graph = rewritten(network(torch.relu, nn.MaxPool2d(3, 2), nn.Conv2d(4, 4, 1)))
    assert graph.rewrites == ("read_sizes", "mask_before_unpooling", "pool_maps")
    pooled = 4 * 4 * 6 * 6
    assert sorted(size for _, size in crossing(graph).values()) == [pooled // 2, 4 * pooled]
    (mask,) = operators(graph.plan.schedule.graph, aten.threshold_backward)
    assert graph.plan.schedule.graph.values[mask.writes[0] or 0].shape == (4, 4, 6, 6)


def test_maps_side_by_side_are_read_from_the_whole() -> None:
    looks = [layer for _ in range(2) for layer in (SideBySide(torch.relu), nn.Conv2d(8, 4, 1))]
    graph = rewritten(network(torch.relu, *looks))
    assert graph.rewrites == ("read_kept", "split_convolutions")
    sizes = sorted(size for _, size in crossing(graph).values())
    assert sizes == [4 * MAP, 4 * MAP, 8 * MAP, 8 * MAP]  # the two concatenations, and not their parts beside them


def test_maps_side_by_side_before_a_pool_are_not_kept() -> None:
    graph = rewritten(network(torch.relu, SideBySide(torch.relu), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)))
    assert graph.rewrites == ("read_sizes", "mask_before_unpooling", "split_convolutions", "pool_maps")
    pooled = 4 * 8 * 7 * 7
    assert sorted(size for _, size in crossing(graph).values()) == [pooled // 2, 4 * pooled, 4 * MAP]


@pytest.mark.parametrize("activation", ["leaky", "relu6", "where", "maximum"])
def test_other_activations_before_a_pool(activation: str) -> None:
    graph = rewritten(network(ACTIVATIONS[activation], nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(4, 4, 1)))
    assert "pool_maps" in graph.rewrites
    assert torch.int64 not in {dtype for dtype, _ in crossing(graph).values()}


def test_dropout_after_relu_keeps_two_booleans() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 512), nn.ReLU(), nn.Dropout(0.4), nn.Linear(512, 2))
    graph = rewritten(model)
    kept = sorted(crossing(graph).values(), key=str)
    assert kept == [(torch.bool, 4 * 512), (torch.bool, 4 * 512), (torch.float32, 4 * 4 * 512)]


def test_a_map_that_is_needed_whole_gets_no_mask() -> None:
    graph = rewritten(network(torch.relu, nn.Conv2d(4, 4, 3), Apply(torch.tanh), nn.Conv2d(4, 4, 3)))
    assert graph.rewrites == ()
    assert graph.plan.schedule.graph is graph.unplanned.schedule.graph


def test_what_the_user_holds_gets_no_mask() -> None:
    assert rewritten(network(torch.relu)).rewrites == ()


def test_what_the_caller_may_write_over_is_not_read_instead() -> None:
    """The pool's result is an output: eager's backward does not look at it, so ours must not."""
    model = network(torch.relu, nn.MaxPool2d(2))
    compiled = encore.compile(copy.deepcopy(model), lowering="eager", overhead=A_LITTLE)
    found = []
    for one in (model, compiled):
        output = one(pictures())
        total = output.sum()
        output.detach().zero_()
        total.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert all(map(same_patterns, *found))
    (graph,) = compiled_call(compiled).session.last_step
    assert "mask_before_unpooling" not in graph.rewrites


@pytest.mark.parametrize("name", sorted(EXACT))
def test_each_pass_can_be_left_out(name: str) -> None:
    model = network(
        torch.relu, nn.MaxPool2d(2), SideBySide(F.relu6), Apply(F.hardsigmoid), nn.AdaptiveMaxPool2d(3),
        nn.Dropout(0.3), nn.Conv2d(8, 4, 1), nn.ReLU(inplace=True), nn.AvgPool2d(2),
    )  # fmt: skip
    assert name in FUSED_PASSES
    assert name not in rewritten(model, skip=name).rewrites


def test_a_step_that_fits_is_left_as_it_is() -> None:
    model = network(torch.relu, nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))
    for options in ({"overhead": 0.0}, {"budget": "100%"}):
        graph = rewritten(model, **options)
        assert graph.rewrites == ()


def test_positions_of_rows_and_classes_cross_narrow() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(100, 16), nn.Linear(16, 300)

        def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            rows = (tokens * 7 + 1) % 100
            seen = self.table(rows) + x[..., None]
            best = self.out(seen).max(-1).values
            return F.cross_entropy(self.out(seen).flatten(0, 1), (rows * 3).flatten()) + best.sum()

    torch.manual_seed(0)
    model, tokens = Tagger(), torch.randint(100, (8, 16))
    compiled = encore.compile(copy.deepcopy(model), lowering="eager", overhead=A_LITTLE)
    x = torch.randn(8, 16)
    want = step(lambda leaf: model(leaf, tokens), model.parameters(), x)
    have = step(lambda leaf: compiled(leaf, tokens), compiled.parameters(), x)
    assert all(map(same_patterns, have, want))
    (graph,) = compiled_call(compiled).session.last_step
    kinds = [dtype for dtype, _ in crossing(graph).values() if dtype is not None and not dtype.is_floating_point]
    assert sorted(kinds, key=str) == [torch.int16, torch.int16, torch.int8]  # of 300 and 300, and of 100


def twice(x: torch.Tensor) -> torch.Tensor:
    """Backward does not need what this makes: it may be written over."""
    return x * 2


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "conv": lambda channels: nn.Conv2d(channels, channels, 3, padding=1),
    "batch_norm": nn.BatchNorm2d,
    "max_pool": lambda channels: nn.MaxPool2d(3, stride=1, padding=1),
    "overlapping": lambda channels: nn.MaxPool2d(3, stride=2, padding=1),
    "avg_pool": lambda channels: nn.AvgPool2d(3, stride=1, padding=1),
    "dropout_": lambda channels: nn.Sequential(Apply(twice), nn.Dropout(0.3, inplace=True)),
    "relu_module_": lambda channels: nn.Sequential(Apply(twice), nn.ReLU(inplace=True)),
    "double": lambda channels: Apply(lambda x: torch.cat([torch.relu(x), F.relu6(x)], 1)[:, :channels]),
}


def layer(name: str) -> nn.Module:
    return Apply(ACTIVATIONS[name]) if name in ACTIVATIONS else LAYERS[name](4)


ANY = st.sampled_from(sorted({*LAYERS, *ACTIVATIONS} - {"relu_"}))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(ANY, min_size=2, max_size=7))
def test_any_stack_of_layers(names: list[str]) -> None:
    torch.manual_seed(0)
    rewritten(nn.Sequential(nn.Conv2d(3, 4, 3), *map(layer, names), nn.Conv2d(4, 2, 1)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ANY, min_size=2, max_size=10))
def test_any_longer_stack_of_layers(names: list[str]) -> None:
    torch.manual_seed(0)
    rewritten(nn.Sequential(nn.Conv2d(3, 4, 3), *map(layer, names), nn.Conv2d(4, 2, 1)))


def two_convolutions(activation: nn.Module | None = None) -> tuple[nn.Module, torch.Tensor]:
    """A map that the second convolution's backward reads whole, and a ReLU's after it for its signs."""
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    x[0, 0, 3, 4], x[1, 1, 5, 5], x[2, 0, :9, :9] = float("nan"), float("inf"), -0.0
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), activation or nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
    return nn.Sequential(*layers), x


def test_a_map_goes_early_for_other_activations() -> None:
    leaky = rewritten(*two_convolutions(nn.LeakyReLU(0.2)))
    assert "sign_bits" in leaky.rewrites
    (signs,) = operators(leaky.plan.schedule.graph, own.encode_sign)
    (masked,) = operators(leaky.plan.schedule.graph, own.masked_by_bits)
    assert (signs.args[1:], masked.args[2:]) == ((False,), (0.2,))
    bounded = rewritten(*two_convolutions(nn.ReLU6()))
    assert "sign_bits" not in bounded.rewrites  # PyTorch's formula is uneven about NaN
    model, x = two_convolutions(nn.ReLU6())
    graph = captured(model, x).unplanned.schedule.graph
    after = sign_bits.apply(split_convolutions.apply(read_kept.apply(graph, exact=False)), exact=False)
    verify_graph(after)
    (inside,) = operators(after, own.encode_inside)
    assert inside.args[1:] == (0.0, 6.0)
    assert not operators(after, aten.hardtanh_backward)


def test_a_map_of_relu6_goes_early_where_the_very_bits_are_not_asked_for() -> None:
    model, x = two_convolutions(nn.ReLU6())
    x = x.nan_to_num(posinf=1.0)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = encore.compile(model, overhead=A_LITTLE)
    assert_all_as_accurate(
        *(step(one, one.parameters(), x.to(next(one.parameters()).dtype)) for one in (compiled, eager, exact))
    )
    (graph,) = compiled_call(compiled).session.last_step
    assert "sign_bits" in graph.rewrites
    assert operators(graph.plan.schedule.graph, own.encode_inside)


def test_a_map_goes_before_the_gradient_of_a_convolutions_input_is_made() -> None:
    model, x = two_convolutions()
    graph = rewritten(model, x)
    assert {"split_convolutions", "sign_bits"} <= set(graph.rewrites)
    after = graph.plan.schedule.graph
    ran = [after.ops[action.op] for action in graph.plan.schedule.backward if isinstance(action, Run)]
    (signs,) = operators(after, own.encode_sign)
    (masked,) = operators(after, own.masked_by_bits)
    (map_,) = signs.reads
    order = [op.id for op in ran]
    readers = [op.id for op in ran if op.target is aten.convolution_backward.default and map_ in op.reads]
    (of_input,) = (op for op in ran if op.target is aten.convolution_backward.default and op.writes[0] in masked.reads)
    places = [order.index(number) for number in (*readers, signs.id, of_input.id, masked.id)]
    assert places == sorted(places)
    assert len(readers) == 1
    held = {name: bytes_ for name, (_, bytes_) in crossing(graph).items()}
    whole = rewritten(model, x, skip=("split_convolutions", "sign_bits"))
    assert held == {name: bytes_ for name, (_, bytes_) in crossing(whole).items()}  # forward keeps what it kept


def test_codecs_serve_graphs_of_a_gpu_by_its_number() -> None:
    """Storages name their device as tensors do: cuda:0."""
    pytest.importorskip("triton")
    model = nn.Sequential(two_convolutions()[0], nn.MaxPool2d(2), nn.Conv2d(16, 4, 1))
    graph = captured(model, torch.randn(4, 3, 32, 32)).unplanned.schedule.graph
    for storage in graph.storages:
        storage.device = "cuda:0"
    graph = split_convolutions.apply(graph)
    for run, forward, backward in (
        (partial(sign_bits.apply, exact=True), own.encode_sign, own.masked_by_bits),
        (pool_maps.apply, own.max_pool_map, own.max_pool_map_backward),
    ):
        after = run(graph)
        verify_graph(after)
        assert len(operators(after, forward)) == len(operators(after, backward)) == 1
        (made,) = operators(after, forward)
        code = after.values[made.writes[-1] or 0]
        assert after.storages[code.storage or 0].device == "cuda:0"


def test_without_kernels_or_with_a_small_map_signs_are_not_taken_early() -> None:
    graph = rewritten(network(torch.relu, nn.Conv2d(4, 4, 3)))
    assert "sign_bits" not in graph.rewrites


@pytest.mark.parametrize("settings", [{"stride": 2}, {"groups": 2}, {"dilation": 2}, {"bias": False}])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_both_gradients_of_a_convolution_come_one_after_the_other(
    dimensions: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that would not be applied: next to so small maps, a weight's gradient that comes early counts."""
    monkeypatch.setattr(
        "encore.compiler.forms.rewrite",
        lambda graph, judge, **given: rewrite(graph, judge, **{**given, "limit": 2**60}),
    )
    kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), kinds[dimensions](4, 6, 3, padding=1, **settings), nn.Tanh())
    eager, x = copy.deepcopy(model), torch.randn(3, 4, *([9] * dimensions))
    compiled = encore.compile(model, lowering="eager", overhead=A_LITTLE)
    pairs = zip(step(compiled, model.parameters(), x), step(eager, eager.parameters(), x), strict=True)
    assert all(same_patterns(mine, its) for mine, its in pairs)
    (graph,) = compiled_call(compiled).session.last_step
    masks = [op.args[10] for op in operators(graph.plan.schedule.graph, aten.convolution_backward)]
    assert sorted(masks) == [[False, True, settings.get("bias", True)], [True, False, False]]


def test_transposed_convolutions_with_channels_last_are_split_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.ConvTranspose2d(4, 6, 3, stride=2), nn.Tanh(), nn.Conv2d(6, 4, 3))
    x = torch.randn(3, 4, 9, 9).contiguous(memory_format=torch.channels_last)
    assert "split_convolutions" in rewritten(model, x).rewrites
