"""Max pooling that keeps where in each window the maximum stood: Gist's map (Jain et al., ISCA 2018), exact.

PyTorch keeps eight bytes a result: the maximum's place in its plane. The place in the window is all that backward
needs, and four bits suffice for windows of up to 16 positions, eight for up to 256. Larger windows are an error.

- `max_pool_map(x, kernel, stride, padding, dilation, ceil_mode) -> (y, map)`: y as `max_pool2d_with_indices` makes it
  (`max_pool3d_with_indices` for a kernel of three dimensions), ties, NaN, -inf and memory format included.
- `max_pool_map_backward(grad, map, input_size, channels_last, kernel, ...) -> grad_x`: as PyTorch's, sums in the same
  order. `channels_last` says how x lay (`channels_last_of`).

**Format.** A position is (kd * KH + kh) * KW + kw, taps counted as if there were no padding. Positions lie in the order
of y's memory: contiguous, or with channels last where x is. Eight bits: byte i. Four bits: byte i // 2, the lower half
first.

A window that dilation moves past all of the input has the result -inf, and its gradient goes nowhere. PyTorch's own
backward writes out of bounds there, and also, in three dimensions with channels last, for a window of nothing but -inf.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.codecs.layout import elements_of
from encore.codecs.native import SUFFIX, call, has_kernels, is_compiled
from encore.codecs.operators import check_code, check_dtype, define, empty_code
from encore.codecs.torch_private import suggest_memory_format
from encore.errors import OptionError

aten = torch.ops.aten

NARROW, MOST = 16, 256
"""Positions in a window that four and eight bits can distinguish."""
FORWARD = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
BACKWARD = {2: aten.max_pool2d_with_indices_backward.default, 3: aten.max_pool3d_with_indices_backward.default}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
PLAIN_BYTES = 64
"""The workspace of PyTorch's own operators for each result, at most."""

Ints = Sequence[int]


class Pool(ctypes.Structure):
    """As `pool_map.cpp` has it."""

    _fields_ = (
        ("planes", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        *((name, ctypes.c_int64 * 3) for name in ("inner", "outer", "kernel", "stride", "padding", "dilation")),
        ("narrow", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """The arguments of a pooling layer, one number a dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def is_narrow(self) -> bool:
        return math.prod(self.kernel) <= NARROW

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode

    def map_bytes(self, results: int) -> int:
        return -(-results // 2) if self.is_narrow else results


def window_of(kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool) -> PoolWindow:
    """Arguments as PyTorch takes them: one number may stand for all dimensions, and no stride means the kernel's."""
    dims = len(kernel)
    if dims not in FORWARD:
        raise OptionError(f"encore::max_pool_map takes a kernel of 2 or 3 dimensions; got {list(kernel)}")
    if math.prod(kernel) > MOST:
        raise OptionError(
            f"encore::max_pool_map distinguishes {MOST} positions of a window; a kernel of {list(kernel)} has "
            f"{math.prod(kernel)}: use aten::max_pool{dims}d_with_indices"
        )

    def each(numbers: Ints) -> tuple[int, ...]:
        return tuple(map(int, numbers)) * (dims if len(numbers) == 1 else 1)

    return PoolWindow(each(kernel), each(stride or kernel), each(padding), each(dilation), ceil_mode)


def channels_last_of(x: Tensor, dims: int) -> bool:
    """Return whether pooling over so many dimensions treats x as channels last."""
    return x.dim() == dims + 2 and suggest_memory_format(x) is LAST[dims]


@functools.lru_cache(maxsize=1024)
def _result_size(size: tuple[int, ...], dtype: torch.dtype, window: PoolWindow) -> tuple[int, ...]:
    """The size of PyTorch's result; raises its errors for arguments that make no sense."""
    results, _ = FORWARD[window.dims](torch.empty(size, dtype=dtype, device="meta"), *window.arguments)
    return tuple(results.shape)


def _format(dims: int, channels_last: bool) -> torch.memory_format:
    return LAST[dims] if channels_last else torch.contiguous_format


def _pool(window: PoolWindow, size: Ints, result: Ints, channels_last: bool) -> Pool:
    """Two dimensions are three, the first of which is 1."""
    dims = window.dims
    outer = math.prod(size[:-dims])
    one, none = (1,) * (3 - dims), (0,) * (3 - dims)
    arrays = (
        (*one, *size[-dims:]), (*one, *result[-dims:]), (*one, *window.kernel), (*one, *window.stride),
        (*none, *window.padding), (*one, *window.dilation),
    )  # fmt: skip
    channels = size[1] if channels_last else 0
    planes = size[0] if channels_last else outer
    return Pool(planes, channels, *((ctypes.c_int64 * 3)(*numbers) for numbers in arrays), window.is_narrow)


# ---- forward -------------------------------------------------------------------------------------------------------


def max_pool_map(
    x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    check_dtype("max_pool_map", x.dtype, tuple(SUFFIX))
    window = window_of(kernel, stride, padding, dilation, ceil_mode)
    results, map_ = _fresh(x, window)
    if results.numel() == 0:
        return results, map_
    channels_last = channels_last_of(x, window.dims)
    if not has_kernels("pool_map", x.device):
        return _plain_forward(x, window, map_)
    source = x.contiguous(memory_format=_format(window.dims, channels_last))
    pool = _pool(window, x.shape, results.shape, channels_last)
    call("pool_map", f"pool_{SUFFIX[x.dtype]}", ctypes.byref(pool), source, results, map_)
    return results, map_


def _fresh(x: Tensor, window: PoolWindow) -> tuple[Tensor, Tensor]:
    size = _result_size(tuple(map(int, x.shape)), x.dtype, window)
    memory_format = _format(window.dims, channels_last_of(x, window.dims))
    results = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format)
    return results, empty_code(x, window.map_bytes(math.prod(size)))


def _fake_forward(
    x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    return _fresh(x, window_of(kernel, stride, padding, dilation, ceil_mode))


def _forward_workspace(x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool) -> int:
    window = window_of(kernel, stride, padding, dilation, ceil_mode)
    copied = _copied(x, _format(window.dims, channels_last_of(x, window.dims)))
    if is_compiled(x.device.type):
        return copied
    return copied + PLAIN_BYTES * math.prod(_result_size(tuple(map(int, x.shape)), x.dtype, window))


def _copied(x: Tensor, memory_format: torch.memory_format) -> int:
    return 0 if x.is_contiguous(memory_format=memory_format) else x.numel() * x.element_size()


# ---- backward ------------------------------------------------------------------------------------------------------


def max_pool_map_backward(
    grad: Tensor, map: Tensor, input_size: Ints, channels_last: bool, kernel: Ints, stride: Ints, padding: Ints,
    dilation: Ints, ceil_mode: bool,
) -> Tensor:  # fmt: skip
    check_dtype("max_pool_map_backward", grad.dtype, tuple(SUFFIX))
    window = window_of(kernel, stride, padding, dilation, ceil_mode)
    size = _result_size(tuple(int(length) for length in input_size), grad.dtype, window)
    if tuple(grad.shape) != size:
        raise OptionError(
            f"max pooling of {list(input_size)} has results {list(size)}, the gradient {list(grad.shape)}"
        )
    check_code("max_pool_map_backward", map, window.map_bytes(grad.numel()))
    if channels_last and len(input_size) != window.dims + 2:
        raise OptionError(f"an input of {list(input_size)} has no channels last: pass channels_last=False")
    memory_format = _format(window.dims, channels_last)
    out = torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=memory_format)
    if not has_kernels("pool_map", grad.device):
        return _plain_backward(grad, map, out, window, memory_format)
    gradient = grad.contiguous(memory_format=memory_format)
    pool = _pool(window, input_size, grad.shape, channels_last)
    call("pool_map", f"pool_backward_{SUFFIX[grad.dtype]}", ctypes.byref(pool), gradient, map, out)
    return out


def _fake_backward(grad: Tensor, map: Tensor, input_size: Ints, channels_last: bool, kernel: Ints, *_: Any) -> Tensor:
    memory_format = _format(len(kernel), channels_last)
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=memory_format)


def _backward_workspace(grad: Tensor, map: Tensor, input_size: Ints, channels_last: bool, kernel: Ints, *_: Any) -> int:
    copied = _copied(grad, _format(len(kernel), channels_last))
    if is_compiled(grad.device.type):
        return copied
    return copied + PLAIN_BYTES * grad.numel() + math.prod(input_size) * grad.element_size()


# ---- without a compiler --------------------------------------------------------------------------------------------


def _starts(window: PoolWindow, results: Ints, device: torch.device) -> list[Tensor]:
    """For each dimension, where the windows begin, shaped to broadcast over the results."""
    starts = []
    for dim in range(window.dims):
        places = torch.arange(results[len(results) - window.dims + dim], device=device)
        places = places * window.stride[dim] - window.padding[dim]
        starts.append(places.view(-1, *[1] * (window.dims - 1 - dim)))
    return starts


def _laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Contiguous in a format, with the strides of a new tensor: `contiguous` leaves those of size 1 as they are."""
    new = torch.empty(tensor.shape, device="meta", memory_format=memory_format)
    return tensor.contiguous(memory_format=memory_format).as_strided(new.shape, new.stride())


def _plain_forward(x: Tensor, window: PoolWindow, map_: Tensor) -> tuple[Tensor, Tensor]:
    memory_format = _format(window.dims, channels_last_of(x, window.dims))
    if window.dims == 3:
        x = x.contiguous()
    results, places = FORWARD[window.dims](x, *window.arguments)
    results = _laid_out(results, memory_format)
    starts = _starts(window, results.shape, x.device)
    position, scale = torch.zeros_like(places), 1
    for dim in reversed(range(window.dims)):
        length = x.shape[x.dim() - window.dims + dim]
        coordinate = places % length
        places = places.div(length, rounding_mode="floor")
        position += (coordinate - starts[dim]).div_(window.dilation[dim], rounding_mode="floor").mul_(scale)
        scale *= window.kernel[dim]
    flat = elements_of(position.contiguous(memory_format=memory_format)).to(torch.uint8)
    if window.is_narrow:
        pairs = torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(-1, 2)
        flat = pairs[:, 0] | pairs[:, 1] << 4
    return results, map_.copy_(flat)


def _plain_backward(
    grad: Tensor, map_: Tensor, out: Tensor, window: PoolWindow, memory_format: torch.memory_format
) -> Tensor:
    flat = torch.stack([map_ & 15, map_ >> 4], 1).view(-1)[: grad.numel()] if window.is_narrow else map_
    position = torch.empty(grad.shape, dtype=torch.int64, device=grad.device, memory_format=memory_format)
    elements_of(position).copy_(flat)
    starts = _starts(window, grad.shape, grad.device)
    places, scale = torch.zeros_like(position), 1
    for dim in reversed(range(window.dims)):
        tap = position % window.kernel[dim]
        position = position.div(window.kernel[dim], rounding_mode="floor")
        places += (tap * window.dilation[dim] + starts[dim]).mul_(scale)
        scale *= out.shape[out.dim() - window.dims + dim]
    if window.dims == 3:
        grad, out, places = grad.contiguous(), out.contiguous(), places.contiguous()
    found = BACKWARD[window.dims](grad, out, *window.arguments, places)
    return _laid_out(found, memory_format)


_WINDOW = "SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode"
MAX_POOL_MAP = define(
    f"max_pool_map(Tensor x, {_WINDOW}) -> (Tensor y, Tensor map)", max_pool_map, _fake_forward, _forward_workspace
)
MAX_POOL_MAP_BACKWARD = define(
    f"max_pool_map_backward(Tensor grad, Tensor map, SymInt[] input_size, bool channels_last, {_WINDOW}) -> Tensor",
    max_pool_map_backward, _fake_backward, _backward_workspace,
)  # fmt: skip
