"""Max pooling with positions in four or eight bits: PyTorch's results and gradients, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from encore import EncoreError
from encore.codecs.pool_map import BACKWARD, FORWARD, channels_last_of
from encore.cost.allocations import measure_cpu
from support.codec_inputs import FLOATS, WAYS, same_numbers, told_workspace, way

ops = torch.ops.encore
Window = tuple[list[int], list[int], list[int], list[int], bool]


@st.composite
def windows(draw: st.DrawFn, dims: int) -> Window:
    most = 5 if dims == 2 else 3
    kernel = [draw(st.integers(1, most)) for _ in range(dims)]
    if draw(st.integers(0, 9)) == 0:
        kernel[-1] = 20
    stride = [draw(st.integers(1, 3)) for _ in range(dims)] if draw(st.booleans()) else []
    padding = [draw(st.integers(0, size // 2)) for size in kernel]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    return kernel, stride, padding, dilation, draw(st.booleans())


@st.composite
def inputs(draw: st.DrawFn, dims: int) -> Tensor:
    dtype = draw(st.sampled_from(FLOATS))
    long = st.integers(1, 40 if dims == 2 else 9)
    shape = [draw(st.integers(0, 3)), draw(st.integers(1, 20)), *(draw(long) for _ in range(dims))]
    if draw(st.integers(0, 4)) == 0:
        shape = shape[1:]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    x = torch.randn(shape, generator=generator)
    kind = draw(st.sampled_from(["numbers", "ties", "special"]))
    if kind != "numbers":
        x = x.round()
    if kind == "special":
        which = torch.randint(5, shape, generator=generator)
        least = float("-inf") if dims == 2 else -1e4  # PyTorch has no answer for windows of -inf in three dimensions
        special = torch.tensor([float("nan"), least, least, -0.0, float("inf")])[which]
        x = torch.where(torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.6, 1.0])), special, x)
    x = x.to(dtype)
    layout = draw(st.sampled_from(["contiguous", "channels_last", "transposed", "gaps"]))
    if layout == "channels_last" and x.dim() == dims + 2:
        return x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x.repeat_interleave(2, -1)[..., ::2] if layout == "gaps" else x


def has_an_answer(x: Tensor, window: Window) -> bool:
    """PyTorch refuses windows larger than their input, and its backward writes out of bounds where one is empty."""
    try:
        y, _ = FORWARD[len(window[0])](x, *window)
    except RuntimeError:
        return False
    return all(is_met(x, y, window, dim) for dim in range(len(window[0])))


def is_met(x: Tensor, y: Tensor, window: Window, dim: int) -> bool:
    """Does every window hold an element? Dilation may step over them all."""
    kernel, stride, padding, dilation, _ = window
    step, size, results = (stride or kernel)[dim], x.shape[dim - len(kernel)], y.shape[dim - len(kernel)]
    taps = [
        [first * step - padding[dim] + tap * dilation[dim] for tap in range(kernel[dim])] for first in range(results)
    ]
    return all(any(0 <= place < size for place in places) for places in taps)


def check(x: Tensor, window: Window, kind: str, how: str) -> None:
    dims = len(window[0])
    y, indices = FORWARD[dims](x, *window)
    grad = torch.randn(y.shape).to(x.dtype)
    grad[torch.rand(y.shape) < 0.1] = -0.0
    if kind == "as y":
        grad = torch.empty_like(y).copy_(grad)
    elif kind == "expanded" and y.numel():
        grad = grad.flatten()[:1].view([1] * y.dim()).expand(y.shape)
    with way(how):
        found, map_ = ops.max_pool_map(x, *window)
        grad_x = ops.max_pool_map_backward(grad, map_, x.shape, channels_last_of(x, dims), *window)
    assert found.stride() == y.stride()
    assert same_numbers(found, y)
    taps = torch.tensor(window[0]).prod().item()
    assert map_.numel() == (-(-y.numel() // 2) if taps <= 16 else y.numel())
    expected = BACKWARD[dims](grad, x, *window, indices)
    assert grad_x.stride() == expected.stride()
    assert same_numbers(grad_x, expected)


WINDOWS: list[Window] = [
    ([3, 3], [2, 2], [1, 1], [1, 1], False),
    ([2, 2], [], [0, 0], [1, 1], True),
    ([3, 3], [1, 1], [1, 1], [1, 1], False),
]
GRADS = st.sampled_from(["contiguous", "as y", "expanded"])


@settings(deadline=None, max_examples=150)
@given(x=inputs(2), window=windows(2), kind=GRADS, how=st.sampled_from(WAYS))
def test_two_dimensions(x: Tensor, window: Window, kind: str, how: str) -> None:
    assume(has_an_answer(x, window))
    check(x, window, kind, how)


@settings(deadline=None, max_examples=60)
@given(x=inputs(3), window=windows(3), kind=GRADS, how=st.sampled_from(WAYS))
def test_three_dimensions(x: Tensor, window: Window, kind: str, how: str) -> None:
    assume(has_an_answer(x, window))
    check(x, window, kind, how)


@pytest.mark.parametrize("how", WAYS)
def test_strides_of_dimensions_with_one_element(how: str) -> None:
    x = torch.randn(1, 2, 2, 1, 1).contiguous(memory_format=torch.channels_last_3d)
    check(x, ([2, 1, 1], [], [0, 0, 0], [1, 1, 1], False), "contiguous", how)
    check(x[:, :, :1], ([1, 1, 1], [], [0, 0, 0], [1, 1, 1], False), "as y", how)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", WINDOWS)
def test_large_ones_on_two_threads(window: Window, layout: torch.memory_format) -> None:
    x = torch.randn(3, 65, 57, 43).relu_().contiguous(memory_format=layout)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check(x, window, "as y", "compiled")
    finally:
        torch.set_num_threads(before)


def test_the_format() -> None:
    x = torch.tensor([[[[0.0, 9, 0, 0, 0, 1], [0, 0, 0, 5, 2, 0]]]])
    for how in WAYS:
        with way(how):
            y, map_ = ops.max_pool_map(x, [2, 2], [], [0], [1], False)
            assert y.flatten().tolist() == [9, 5, 2]
            assert map_.tolist() == [1 | 3 << 4, 2]
            _, map_ = ops.max_pool_map(x, [1, 17], [1, 2], [0, 8], [1], False)
            assert map_.tolist() == [9, 7, 5, 11, 9, 7]


def test_opcheck() -> None:
    x = torch.randn(2, 3, 9, 7).contiguous(memory_format=torch.channels_last)
    window: tuple[Any, ...] = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    torch.library.opcheck(ops.max_pool_map.default, (x, *window))
    y, map_ = ops.max_pool_map(x, *window)
    torch.library.opcheck(ops.max_pool_map_backward.default, (y, map_, x.shape, True, *window))


def test_nothing_but_results_is_allocated() -> None:
    x = torch.randn(2, 3, 40, 40)
    window: tuple[Any, ...] = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    y, map_ = ops.max_pool_map(x, *window)
    for operator, args in [
        (ops.max_pool_map.default, (x, *window)),
        (ops.max_pool_map.default, (x[:, :, :, ::2], *window)),
        (ops.max_pool_map_backward.default, (y, map_, x.shape, False, *window)),
        (ops.max_pool_map_backward.default, (y.sum().expand(y.shape), map_, x.shape, False, *window)),
    ]:
        measured = measure_cpu(functools.partial(operator, *args))
        assert measured.step_peak - measured.left == told_workspace(operator, *args)


def test_refusals() -> None:
    x = torch.randn(1, 1, 40, 40)
    with pytest.raises(EncoreError, match=r"distinguishes 256 positions .* has 272: use aten::max_pool2d_with_indices"):
        ops.max_pool_map(x, [16, 17], [], [0], [1], False)
    with pytest.raises(EncoreError, match=r"kernel of 2 or 3 dimensions"):
        ops.max_pool_map(x, [16], [], [0], [1], False)
    with pytest.raises(EncoreError, match=r"max_pool_map takes .*; got torch.int64"):
        ops.max_pool_map(x.long(), [2, 2], [], [0], [1], False)
    y, map_ = ops.max_pool_map(x, [2, 2], [], [0], [1], False)
    with pytest.raises(EncoreError, match=r"results \[1, 1, 20, 20\], the gradient \[1, 1, 20, 19\]"):
        ops.max_pool_map_backward(y[..., 1:], map_, x.shape, False, [2, 2], [], [0], [1], False)
    with pytest.raises(EncoreError, match=r"code of 100 bytes"):
        ops.max_pool_map_backward(y, map_[:100], x.shape, False, [2, 2], [], [0], [1], False)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_wrong_map_adds_nothing_outside(channels_last: bool) -> None:
    window: tuple[Any, ...] = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    grad = torch.ones(1, 4, 5, 5)
    wrong = torch.full((50,), 0xFF, dtype=torch.uint8)
    found = ops.max_pool_map_backward(grad, wrong, [1, 4, 9, 9], channels_last, *window)
    assert found.abs().sum() == 0
    outside = torch.zeros(50, dtype=torch.uint8)  # the first tap of the first row is padding
    assert ops.max_pool_map_backward(grad, outside, [1, 4, 9, 9], channels_last, *window).sum() == 4 * 16
