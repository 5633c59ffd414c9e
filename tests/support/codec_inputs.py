"""Tensors to encode, in any layout, with any numbers; and the two ways in which codecs run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from encore.codecs import CODECS, WORKSPACES, native
from encore.codecs.layout import layout_like

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WAYS = ("compiled", "plain")


@contextmanager
def way(name: str) -> Iterator[None]:
    """Codecs run in C++, or in PyTorch's own operators as they do without a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "plain":
            patch.setattr(native, "_compiled", lambda _: None)
        yield


def patterns(numbers: Tensor) -> Tensor:
    """The bits of a tensor's elements."""
    dtype = torch.uint8 if numbers.dtype is torch.bool else BITS[numbers.dtype.itemsize]
    return numbers.clone(memory_format=torch.contiguous_format).view(dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype is expected.dtype and torch.equal(patterns(found), patterns(expected))


def same_numbers(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, except that one NaN is as good as another."""
    nan = expected.isnan()
    zeros = torch.zeros((), dtype=expected.dtype)
    return torch.equal(found.isnan(), nan) and same_bits(found.where(~nan, zeros), expected.where(~nan, zeros))


def specials(dtype: torch.dtype) -> Tensor:
    """Numbers at which encodings go wrong."""
    info = torch.finfo(dtype)
    around = [0.0, 1.0, info.tiny, info.smallest_normal / 4, info.max, float("inf"), float("nan"), 447.0, 65503.0, 0.5]
    return torch.tensor(around + [-number for number in around], dtype=torch.float64).to(dtype)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], str]:
    """A shape and a name for how it lies in memory."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    if draw(st.booleans()):
        shape = (*shape, draw(st.integers(1, 300)))
    kinds = ["contiguous", "permuted", "gaps", "expanded", "offset", "windows"]
    if len(shape) == 4:
        kinds.append("channels_last")
    return shape, draw(st.sampled_from(kinds))


def laid_out(values: Tensor, kind: str) -> Tensor:
    """A tensor of this shape whose memory is of that kind; `expanded` and `windows` repeat values."""
    if kind == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    if kind == "permuted":
        order = list(range(values.dim()))[::-1]
        return values.permute(order).contiguous().permute(order)
    if kind == "offset":
        memory = torch.cat([values.new_zeros(3), values.reshape(-1)])
        return memory[3:].view(values.shape)
    if values.dim() == 0 or values.numel() == 0:
        return values.contiguous()
    if kind == "gaps":
        wide = values.new_ones((*values.shape[:-1], 2 * values.shape[-1]))
        wide[..., ::2] = values
        return wide[..., ::2]
    if kind == "expanded":
        return values[:1].expand(values.shape)
    if kind == "windows":
        steps = [1] * values.dim()
        return values.reshape(-1).as_strided(values.shape, steps)
    return values.contiguous()


@st.composite
def float_tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = FLOATS, zeros: float | None = None) -> Tensor:
    """Floats of all sizes in any layout, with zeros among them, and now and then special numbers."""
    dtype = draw(st.sampled_from(dtypes))
    shape, kind = draw(layouts())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values *= 2.0 ** draw(st.sampled_from([0, 0, 0, -10, -20, -130, 6, 15]))
    share = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])) if zeros is None else zeros
    values *= torch.rand(shape, generator=generator) >= share
    values = values.to(dtype)
    if draw(st.booleans()):
        picked = torch.randint(len(specials(dtype)), shape, generator=generator)
        values = torch.where(torch.rand(shape, generator=generator) < 0.3, specials(dtype)[picked], values)
    return laid_out(values, kind)


def round_trip(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The code and what comes back; sizes, strides and bytes are checked on the way."""
    codec = CODECS[name]
    code = codec.encode(*codec.encode_args(x))
    expected = codec.nbytes(x.shape, x.stride(), x.dtype)
    assert code.dtype is torch.uint8
    assert code.dim() == 1
    assert code.is_contiguous()
    assert code.untyped_storage().nbytes() == code.numel()
    assert code.numel() == expected if codec.exact_size else code.numel() <= expected
    back = codec.decode(*codec.decode_args(code, x.shape, x.stride(), x.dtype))
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
    assert back.untyped_storage().data_ptr() != code.untyped_storage().data_ptr() or back.numel() == 0
    return code, back


def told_workspace(operator: Any, *args: Any) -> int:
    return WORKSPACES[operator](*args)


def is_gathered(x: Tensor) -> bool:
    return layout_like(x).gathered
