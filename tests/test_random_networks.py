"""Random models of a fair size: a planned step is eager's (in kernels: as close to float64 as eager's), legal, and
within one percent of its prediction, all under `ENCORE_CHECK=1`.

A model is a list of layer specs in plain data, so that a failing one shrinks to something readable. Every spec fits
every shape `[batch, time, channel]`; what a layer cannot do at its place (a chunk of a single channel) it leaves out.
Specs of feature maps `[batch, channel, height, width]` stand inside a `maps` layer, which ends in views of the last
map and several readers of them. With `eager_to_rewrite`, every rewrite is taken to pay, whatever the machine.

`ENCORE_RANDOM_NETWORKS` is how many networks the slow tests draw; `--hypothesis-seed` draws others.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import encore
from encore.api import compiled_call
from encore.options import METHODS
from encore.rewrite import Judge
from encore.schedule import Fused, Schedule, fuse, replay, simulate
from support.captured_graphs import captured, drop_gradients, train_step
from support.compare_with_eager import run_step
from support.observed_steps import errors_of
from support.rounding import FACTOR

Spec = tuple[Any, ...]
BATCH, TIME, CHANNELS, VOCABULARY = 4, 16, 16, 11
COLOURS, SIDE = 8, 4
"""An image has as many places as a sequence has steps."""
MANY = int(os.environ.get("ENCORE_RANDOM_NETWORKS", "300"))
VERDICTS = ("transposed_pays", "stacking_pays", "stacking_gradients_pays", "merging_pays", "channels_last_pays")


class Layer(nn.Module):
    """One spec, made for the shape it finds."""

    def __init__(self, spec: Spec, time: int, channels: int) -> None:
        super().__init__()
        self.kind, self.settings = spec[0], spec[1:]
        if self.kind in ("linear", "linear_relu_"):
            self.linear = nn.Linear(channels, self.settings[0])
        elif self.kind == "shared":
            self.linear = nn.Linear(channels, channels)
        elif self.kind == "conv1d":
            outputs, kernel = self.settings
            self.conv = nn.Conv1d(channels, outputs, kernel, padding=kernel // 2)
        elif self.kind == "layer_norm":
            self.norm: nn.Module = nn.LayerNorm(channels)
        elif self.kind == "batch_norm":
            self.norm = nn.BatchNorm1d(channels)
        elif self.kind in ("residual", "concat"):
            self.branch = Stack(self.settings[0], time, channels)
        elif self.kind == "maps":
            specs, leave, readers = self.settings
            self.maps = Maps(specs, leave, readers, torch.zeros(BATCH, 1, time, channels))

    def forward(self, x: torch.Tensor, outputs: list[torch.Tensor]) -> torch.Tensor:
        if self.kind == "linear":
            return self.linear(x)
        if self.kind == "linear_relu_":
            return F.relu(self.linear(x), inplace=True)
        if self.kind == "shared":
            return self.linear(torch.tanh(self.linear(x)))
        if self.kind == "conv1d":
            return self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "layer_norm":
            return self.norm(x)
        if self.kind == "batch_norm":
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.kind in ("residual", "concat"):
            return JOIN[self.kind](x, self.branch(x, outputs))
        if self.kind == "maps":
            return self.maps(x.unsqueeze(1))
        if self.kind == "output":
            outputs.append(x)
            return x * 1.5
        return PLAIN[self.kind](x, *self.settings)


class Maps(nn.Module):
    """Specs of feature maps, one after the other, then a view of the last map and so many readers of it."""

    def __init__(self, specs: list[Spec], leave: str, readers: int, example: torch.Tensor) -> None:
        super().__init__()
        self.specs, self.leave, self.readers = specs, leave, readers
        self.layers = nn.ModuleList()
        with torch.no_grad():
            for spec in specs:
                self.layers.append(map_layer(spec, example))
                example = self._step(spec, self.layers[-1], example).contiguous()
            rows = LEAVE[leave](example)
        self.heads = nn.ModuleList(nn.Linear(rows.shape[2], CHANNELS) for _ in range(readers))

    def _step(self, spec: Spec, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if spec[0] == "halves2d":
            return halves(x)
        return x + layer(x) if spec[0] == "residual2d" else layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for spec, layer in zip(self.specs, self.layers, strict=True):
            x = self._step(spec, layer, x)
        rows = LEAVE[self.leave](x)
        functions = (lambda y: y, torch.sigmoid, torch.tanh, lambda y: y * y)
        read = [head(function(rows)) for head, function in zip(self.heads, functions, strict=False)]
        return torch.stack(read).sum(0)


def map_layer(spec: Spec, x: torch.Tensor) -> nn.Module:
    kind, channels = spec[0], x.shape[1]
    if kind == "conv2d":
        outputs, kernel, stride = spec[1:]
        return nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2)
    if kind == "residual2d":
        return nn.Sequential(nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
    if kind == "batch_norm2d":
        return nn.BatchNorm2d(channels)
    if kind in ("max_pool2d", "mean_pool2d"):
        if min(x.shape[2:]) < 2:
            return nn.Identity()
        return nn.MaxPool2d(2) if kind == "max_pool2d" else nn.AvgPool2d(2)
    if kind in ("relu2d", "relu2d_"):
        return nn.ReLU(inplace=kind == "relu2d_")
    return nn.Dropout() if kind == "dropout2d" else nn.Identity()


def halves(x: torch.Tensor) -> torch.Tensor:
    one, other = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    return one * torch.sigmoid(other) if one.shape == other.shape else x


class ImageEntry(nn.Module):
    """A convolution of an image; its places become steps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(COLOURS, CHANNELS, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


class Stack(nn.Module):
    """Specs, one after the other."""

    def __init__(self, specs: list[Spec], time: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        x = torch.zeros(BATCH, time, channels)
        for spec in specs:
            layer = Layer(spec, x.shape[1], x.shape[2])
            self.layers.append(layer)
            with torch.no_grad():
                x = layer(x, []).contiguous()

    def forward(self, x: torch.Tensor, outputs: list[torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, outputs)
        return x


class Network(nn.Module):
    """An embedding, a linear layer or a convolution, then a stack; returns what the stack puts out on its way, and its
    end, which goes through the weights of the first layer once more if they are `tied`."""

    def __init__(self, reads: str, specs: list[Spec], tied: bool = False) -> None:
        super().__init__()
        self.reads, self.tied = reads, tied and reads != "images"
        make = {
            "tokens": lambda: nn.Embedding(VOCABULARY, CHANNELS),
            "numbers": lambda: nn.Linear(CHANNELS, CHANNELS),
            "images": ImageEntry,
        }
        self.enter: nn.Module = make[reads]()
        self.stack = Stack(specs, TIME, CHANNELS)

    def example(self) -> torch.Tensor:
        if self.reads == "tokens":
            return torch.randint(VOCABULARY, (BATCH, TIME))
        if self.reads == "images":
            return torch.randn(BATCH, COLOURS, SIDE, SIDE).to(memory_format=torch.channels_last)
        return torch.randn(BATCH, TIME, CHANNELS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: list[torch.Tensor] = []
        x = self.stack(self.enter(x), outputs)
        if self.tied and x.shape[2] == CHANNELS:
            weight = self.enter.weight
            assert isinstance(weight, torch.Tensor)
            x = x @ weight.t()
        return (*outputs, x)


def add_common(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    time, channels = min(x.shape[1], y.shape[1]), min(x.shape[2], y.shape[2])
    return x[:, :time, :channels] + y[:, :time, :channels]


def side_by_side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    time = min(x.shape[1], y.shape[1])
    return torch.cat([x[:, :time], y[:, :time]], dim=2)


def chunk(x: torch.Tensor, pieces: int, dim: int) -> torch.Tensor:
    parts = x.chunk(pieces, dim=dim)
    return parts[0] * torch.sigmoid(parts[-1]) if parts[0].shape == parts[-1].shape else x


def every(x: torch.Tensor, start: int, step: int, dim: int) -> torch.Tensor:
    if start >= x.shape[dim]:
        return x
    return x[:, start::step] if dim == 1 else x[:, :, start::step]


def expand(x: torch.Tensor) -> torch.Tensor:
    return x.mean(dim=1, keepdim=True).expand(-1, x.shape[1], -1)


def halve_channels(x: torch.Tensor) -> torch.Tensor:
    """Two channels of one step become one channel of two steps."""
    return x.reshape(x.shape[0], x.shape[1] * 2, x.shape[2] // 2) if x.shape[2] % 2 == 0 else x


def add_(x: torch.Tensor) -> torch.Tensor:
    y = x * 0.5
    y.add_(x)
    return y


def mul_(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.mul_(0.5)
    return y


def relu_(x: torch.Tensor) -> torch.Tensor:
    return torch.relu_(x + 0.1)


def part_(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, ::2].mul_(3)
    return y


def transposed_add_(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.transpose(1, 2).add_(1)
    return y


def max_pool(x: torch.Tensor, kernel: int) -> torch.Tensor:
    return F.max_pool1d(x, kernel) if x.shape[2] >= kernel else x


def mean_pool(x: torch.Tensor, kernel: int) -> torch.Tensor:
    return F.avg_pool1d(x, kernel) if x.shape[2] >= kernel else x


LEAVE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten": lambda maps: maps.flatten(1).unsqueeze(1),
    "columns": lambda maps: maps.flatten(2).transpose(1, 2),
    "rows": lambda maps: maps.permute(0, 2, 1, 3).flatten(2),
    "permute": lambda maps: maps.permute(0, 2, 3, 1).reshape(maps.shape[0], -1, maps.shape[1]),
    "reshape": lambda maps: maps.reshape(maps.shape[0], maps.shape[1], -1),
    "chunk": lambda maps: maps.chunk(2, 2)[0].flatten(2),
}
"""Views of a feature map, as `[batch, time, channel]`."""
JOIN: dict[str, Callable[..., torch.Tensor]] = {"residual": add_common, "concat": side_by_side}
PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1).contiguous(),
    "halve_channels": halve_channels,
    "chunk": chunk,
    "slice": every,
    "expand": expand,
    "relu_": relu_,
    "add_": add_,
    "mul_": mul_,
    "part_": part_,
    "transposed_add_": transposed_add_,
    "dropout": lambda x, p: F.dropout(x, p),
    "softmax": lambda x, dim: x.softmax(dim=dim),
    "max_pool": max_pool,
    "mean_pool": mean_pool,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "times_mask": lambda x: x * (x > 0),
    "flip": lambda x: x.flip(1),
}

NO_SETTINGS = (
    "transpose", "permute", "halve_channels", "expand", "relu_", "add_", "mul_", "part_", "transposed_add_", "gelu",
    "sigmoid", "masked_fill", "times_mask", "flip", "shared", "layer_norm", "batch_norm", "output",
)  # fmt: skip
widths = st.sampled_from([8, 16, 24])
dims = st.sampled_from([1, 2])
single_layers: st.SearchStrategy[Spec] = st.one_of(
    st.tuples(st.sampled_from(NO_SETTINGS)),
    st.tuples(st.sampled_from(["linear", "linear_relu_"]), widths),
    st.tuples(st.just("conv1d"), widths, st.sampled_from([1, 3])),
    st.tuples(st.just("chunk"), st.sampled_from([2, 4]), dims),
    st.tuples(st.just("slice"), st.integers(0, 3), st.sampled_from([1, 2]), dims),
    st.tuples(st.just("dropout"), st.sampled_from([0.25, 0.5])),
    st.tuples(st.just("softmax"), dims),
    st.tuples(st.sampled_from(["max_pool", "mean_pool"]), st.sampled_from([2, 3])),
)
map_specs: st.SearchStrategy[Spec] = st.one_of(
    st.tuples(st.just("conv2d"), widths, st.sampled_from([1, 3]), st.sampled_from([1, 1, 2])),
    st.tuples(st.sampled_from([
        "residual2d", "batch_norm2d", "max_pool2d", "mean_pool2d", "relu2d", "relu2d_", "dropout2d", "halves2d",
    ])),
)  # fmt: skip
maps: st.SearchStrategy[Spec] = st.tuples(
    st.just("maps"),
    st.lists(map_specs, max_size=4).map(lambda specs: [("conv2d", 16, 3, 1), *specs]),
    st.sampled_from(sorted(LEAVE)),
    st.integers(1, 4),
)
layer_specs: st.SearchStrategy[Spec] = st.recursive(
    st.one_of(single_layers, single_layers, maps),
    lambda inner: st.tuples(st.sampled_from(["residual", "concat"]), st.lists(inner, max_size=3)),
    max_leaves=4,
)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A network, and what the rewrites take to pay."""

    reads: str
    specs: list[Spec]
    tied: bool
    eager_to_rewrite: bool

    def make(self) -> Network:
        return Network(self.reads, self.specs, self.tied)


networks = given(
    drawn=st.builds(
        Drawn,
        reads=st.sampled_from(["numbers", "tokens", "images"]),
        specs=st.lists(layer_specs, min_size=1, max_size=6),
        tied=st.booleans(),
        eager_to_rewrite=st.booleans(),
    )
)


@contextlib.contextmanager
def checking(drawn: Drawn) -> Iterator[None]:
    """What is compiled inside is checked while it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENCORE_CHECK", "1")
        if drawn.eager_to_rewrite:
            for verdict in VERDICTS:
                patch.setattr(Judge, verdict, lambda *_: True)
        torch._dynamo.reset()
        torch.manual_seed(0)
        yield


def examples(count: int, **options: Any) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow], **options)


def check_promises(drawn: Drawn, lowering: str) -> None:
    with checking(drawn):
        check_promises_of(drawn, lowering)


def check_promises_of(drawn: Drawn, lowering: str) -> None:
    plain = drawn.make()
    network, x = encore.compile(copy.deepcopy(plain), lowering=lowering), plain.example()

    if lowering == "eager":
        assert encore.verify(network, x).bit_equal
    else:
        assert_close_to_float64(run_step(network, (x,)), plain, x)
        drop_gradients(network)

    measured = encore.measure(lambda: train_step(network, x)).step_peak
    drop_gradients(network)
    report = encore.report(network)
    predicted = report.planned.step_peak
    assert measured <= predicted <= 1.01 * measured
    assert predicted <= report.unplanned.step_peak

    session = compiled_call(network).session
    (graph,) = session.last_step
    schedule = graph.plan.schedule
    assert replay(schedule, limit=predicted, workspace=session.workspaces) <= predicted
    assert replay(schedule) == max(moment.peak for moment in simulate(schedule).moments if moment.phase != "end")


def check_codes(drawn: Drawn, methods: tuple[str, ...]) -> None:
    """As little as these methods can hold: eager's bits, within the prediction, and legal step by step."""
    with checking(drawn):
        check_codes_of(drawn, methods)


def check_codes_of(drawn: Drawn, methods: tuple[str, ...]) -> None:
    plain = drawn.make()
    x = plain.example()
    network = encore.compile(copy.deepcopy(plain), lowering="eager", budget="min", methods=methods)
    assert encore.verify(network, x).bit_equal
    drop_gradients(network)
    measured = encore.measure(lambda: train_step(network, x)).step_peak
    drop_gradients(network)
    report = encore.report(network)
    assert measured <= report.planned.step_peak <= report.unplanned.step_peak
    assert {row.action for row in report.decisions} <= {"keep", *methods}
    session = compiled_call(network).session
    (graph,) = session.last_step
    predicted = graph.plan.timeline.step_peak
    assert replay(graph.plan.schedule, limit=predicted, workspace=session.workspaces) <= predicted


def assert_close_to_float64(found: dict[str, torch.Tensor], plain: Network, x: torch.Tensor) -> None:
    for name, (ours, eagers) in errors_of(found, plain, (x,)).items():
        assert ours <= FACTOR * eagers + 2e-6, name


@examples(8, derandomize=True)
@networks
def test_a_random_network_keeps_every_promise(drawn: Drawn) -> None:
    check_promises(drawn, "eager")


@examples(3, derandomize=True)
@networks
@example(Drawn("images", [("maps", [("conv2d", 16, 3, 1), ("conv2d", 24, 3, 1)], "flatten", 2)], False, True))
def test_a_random_network_keeps_every_promise_in_kernels(drawn: Drawn) -> None:
    check_promises(drawn, "fused")


@examples(3, derandomize=True)
@networks
def test_a_random_network_keeps_its_promises_in_codes(drawn: Drawn) -> None:
    check_codes(drawn, ("encode",))


@pytest.mark.slow
@pytest.mark.parametrize("methods", [("encode",), METHODS], ids=" and ".join)
@examples(100)
@networks
def test_many_random_networks_keep_their_promises_in_codes(methods: tuple[str, ...], drawn: Drawn) -> None:
    check_codes(drawn, methods)


@pytest.mark.slow
@examples(MANY)
@networks
def test_many_random_networks_keep_every_promise(drawn: Drawn) -> None:
    check_promises(drawn, "eager")


@pytest.mark.slow
@examples(MANY)
@networks
def test_many_random_networks_keep_every_promise_in_kernels(drawn: Drawn) -> None:
    check_promises(drawn, "fused")


@examples(3, derandomize=True)
@networks
def test_the_layers_of_a_network_repeated_have_no_other_kernels(drawn: Drawn) -> None:
    """Twice the same network, side by side: equal structures have equal kernels."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = drawn.make(), drawn.make()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any]:
            return self.left(x), self.right(y)

    torch._dynamo.reset()
    twins = Twice()
    inputs = twins.left.example(), twins.right.example()
    alone = kernel_keys(fuse(captured(twins.left, *inputs[:1]).plan.schedule))
    assert sorted(kernel_keys(fuse(captured(twins, *inputs).plan.schedule))) == sorted(alone * 2)


def kernel_keys(schedule: Schedule) -> list[str]:
    """The kernels of a forward, one for each time they run."""
    return [action.kernel.key for action in schedule.forward if isinstance(action, Fused)]
