"""Integers in the fewest bytes that their range allows: indices of tokens, classes, positions. Lossless.

**Format.** Where the range is known (`max_index` >= 0, numbers from 0 to it): n unsigned integers of the fewest bytes
(1, 2, 4 or 8) that hold `max_index`, nothing else. A number outside of the range is refused, never cut. Where it is not
known (`max_index` = -1): a header of 16 bytes, int64 base (the least number) and int64 width (0, 1, 2, 3 for 1, 2, 4, 8
bytes), and n unsigned integers of that width, each a number less the base. Everything is little-endian.

`uint8`, `uint16` and `uint32` are codecs for known ranges; `integers` is the one that looks at the data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from encore.codecs.codec import Codec, Share
from encore.codecs.layout import Restored, elements_of, gathered_bytes, layout_like, layout_of
from encore.codecs.native import call, has_kernels, is_compiled
from encore.codecs.operators import check_code, check_dtype, define, empty_code, fake_code, fake_decoded
from encore.errors import OptionError

INTEGERS = (torch.int64, torch.int32, torch.int16)
HEADER = 16
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
SLICE = 1 << 16
"""Elements that are converted at a time where PyTorch's own operators do it."""
PLAIN_BYTES = 32


def width_for(span: int) -> int:
    """The fewest bytes that hold the numbers from 0 to `span`."""
    return next(width for width in UNSIGNED if span < 1 << 8 * width)


def width_at(density: float, dtype: torch.dtype) -> int:
    """Bytes of a number in a code where such a share of its own bytes is needed."""
    return next(width for width in UNSIGNED if width >= density * dtype.itemsize)


def range_of(x: Tensor) -> tuple[int, int]:
    """The least and the largest of a tensor's numbers; zeros where it has none."""
    flat = elements_of(x)
    return _range(flat) if flat.numel() else (0, 0)


def encode_integers(x: Tensor, max_index: int = -1) -> Tensor:
    check_dtype("encode_integers", x.dtype, INTEGERS)
    flat = elements_of(x)
    least, most = range_of(flat)
    if max_index >= 0 and (least < 0 or most > max_index):
        raise OptionError(
            f"encore::encode_integers was told of numbers from 0 to {max_index}, and found {least} to {most}: give the "
            "true max_index, or -1 to have it looked for"
        )
    base = 0 if max_index >= 0 else least
    width = width_for(max_index if max_index >= 0 else most - least)
    header = 0 if max_index >= 0 else HEADER
    code = empty_code(x, header + flat.numel() * width)
    if header:
        code[:HEADER].view(torch.int64).copy_(torch.tensor([base, width.bit_length() - 1]))
    narrow = code[header:].view(UNSIGNED[width])
    if has_kernels("integers", x.device):
        call("integers", f"narrow_{8 * x.dtype.itemsize}_{8 * width}", flat, flat.numel(), base, narrow)
    else:
        for first in range(0, flat.numel(), SLICE):
            part = flat[first : first + SLICE].to(torch.int64) - base
            narrow[first : first + SLICE].copy_(part.view(torch.uint64))
    return code


def _range(flat: Tensor) -> tuple[int, int]:
    if has_kernels("integers", flat.device):
        least, most = ctypes.c_int64(), ctypes.c_int64()
        ends = ctypes.byref(least), ctypes.byref(most)
        call("integers", f"range_{8 * flat.dtype.itemsize}", flat, flat.numel(), *ends)
        return least.value, most.value
    low, high = flat.aminmax()
    return int(low), int(high)


def decode_integers(
    code: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, max_index: int = -1
) -> Tensor:
    check_dtype("decode_integers", dtype, INTEGERS)
    count = layout_of(size, stride).count
    base, width = 0, 0
    if max_index >= 0:
        header, width = 0, width_for(max_index)
    else:
        header = HEADER
        check_code("decode_integers", code, header)
        base, exponent = code[:HEADER].view(torch.int64).tolist()
        if exponent not in range(4):
            raise OptionError(f"encore::decode_integers was given bytes that encode_integers did not make: {exponent}")
        width = 1 << exponent
    check_code("decode_integers", code, header + count * width)
    restored = Restored(size, stride, dtype, code.device)
    narrow = code[header : header + count * width].view(UNSIGNED[width])
    if has_kernels("integers", code.device):
        call("integers", f"widen_{8 * dtype.itemsize}_{8 * width}", narrow, count, base, restored.flat)
    else:
        for first in range(0, count, SLICE):
            part = narrow[first : first + SLICE].to(torch.uint64).view(torch.int64) + base
            restored.flat[first : first + SLICE].copy_(part)
    return restored.finish()


def _most_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, max_index: int) -> int:
    count = layout_of(size, stride).count
    return count * width_for(max_index) if max_index >= 0 else HEADER + count * dtype.itemsize


def _fake_encoded(x: Tensor, max_index: int = -1) -> Tensor:
    most = _most_bytes(x.shape, x.stride(), x.dtype, max_index)
    return empty_code(x, most) if max_index >= 0 else fake_code(x, most)


def _encode_workspace(x: Tensor, max_index: int = -1) -> int:
    return gathered_bytes(x.shape, x.stride(), x.dtype) + _aside(layout_like(x).count, x.device, max_index)


def _decode_workspace(
    code: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, max_index: int = -1
) -> int:
    return gathered_bytes(size, stride, dtype) + _plain_bytes(layout_of(size, stride).count, code.device)


def _aside(count: int, device: torch.device, max_index: int) -> int:
    return _plain_bytes(count, device) + (HEADER if max_index < 0 else 0)


def _plain_bytes(count: int, device: torch.device) -> int:
    return 0 if is_compiled(device.type) else PLAIN_BYTES * min(count, SLICE)


ENCODE = define(
    "encode_integers(Tensor x, int max_index=-1) -> Tensor", encode_integers, _fake_encoded, _encode_workspace
)
DECODE = define(
    "decode_integers(Tensor code, SymInt[] size, SymInt[] stride, ScalarType dtype, int max_index=-1) -> Tensor",
    decode_integers, fake_decoded, _decode_workspace,
)  # fmt: skip


def _codec(name: str, what: str, max_index: int) -> Codec:
    def accepts(shape: Sequence[int], dtype: torch.dtype) -> bool:
        return dtype in INTEGERS and (max_index < 0 or width_for(max_index) < dtype.itemsize)

    def nbytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, density: float | None = None) -> int:
        if max_index >= 0 or density is None:
            return _most_bytes(shape, stride, dtype, max_index)
        return HEADER + layout_of(shape, stride).count * width_at(density, dtype)

    return Codec(
        name=name,
        what=what,
        lossless=True,
        encode=ENCODE,
        decode=DECODE,
        accepts=accepts,
        nbytes=nbytes,
        exact_size=max_index >= 0,
        share=Share.NUMBER_BYTES,
        options=(max_index,),
    )


INTEGER_CODECS = (
    _codec("uint8", "indices up to 255 in one byte", (1 << 8) - 1),
    _codec("uint16", "indices up to 65535 in two bytes", (1 << 16) - 1),
    _codec("uint32", "indices up to 4294967295 in four bytes", (1 << 32) - 1),
    _codec("integers", "integers in the fewest bytes that their range allows", -1),
)


def for_range(max_index: int) -> Codec | None:
    """The narrowest codec for indices from 0 to `max_index`; none where they need all of eight bytes."""
    width = width_for(max_index)
    return next((codec for codec in INTEGER_CODECS[:3] if width_for(codec.options[0]) == width), None)
