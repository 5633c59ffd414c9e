"""Integers in the fewest bytes that their range allows: indices of tokens, classes, positions. Lossless.

**Format.** Where the range is known (`max_index` >= 0, numbers from 0 to it): n unsigned integers of the fewest bytes
(1, 2, 4 or 8) for `max_index`, nothing else. A number outside of the range is an error, never cut. If it is not
known (`max_index` = -1): a header of 16 bytes, int64 base (the least number) and int64 width (0, 1, 2, 3 for 1, 2, 4, 8
bytes), and n unsigned integers of that width, each a number less the base. Everything is little-endian.

`uint8`, `uint16` and `uint32` are codecs for known ranges; `integers` is the one that looks at the data.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from encore.codecs.codec import Codec, Coding, Share
from encore.codecs.layout import elements_of
from encore.codecs.native import call, has_kernels, is_compiled
from encore.codecs.operators import check_code, check_dtype, empty_code
from encore.errors import OptionError

INTEGERS = (torch.int64, torch.int32, torch.int16)
HEADER = 16
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
SLICE = 1 << 16
"""Elements that are converted at a time by PyTorch's own operators."""
PLAIN_BYTES = 32
"""Their workspace for each element, at most."""


def width_for(span: int) -> int:
    """The fewest bytes in which the numbers from 0 to `span` fit."""
    return next(width for width in UNSIGNED if span < 1 << 8 * width)


def width_at(density: float, dtype: torch.dtype) -> int:
    """Bytes of a number in a code where such a share of its own bytes is needed."""
    return next(width for width in UNSIGNED if width >= density * dtype.itemsize)


def range_of(x: Tensor) -> tuple[int, int]:
    """The least and the largest of a tensor's numbers; zeros if it has none."""
    flat = elements_of(x)
    return _range(flat) if flat.numel() else (0, 0)


def encode_integers(flat: Tensor, max_index: int = -1) -> Tensor:
    check_dtype("encode_integers", flat.dtype, INTEGERS)
    least, most = range_of(flat)
    if max_index >= 0 and (least < 0 or most > max_index):
        raise OptionError(
            f"encore::encode_integers takes numbers from 0 to {max_index}, and found {least} to {most}: give the true "
            "max_index, or -1 to have it looked for"
        )
    base = 0 if max_index >= 0 else least
    width = width_for(max_index if max_index >= 0 else most - least)
    header = 0 if max_index >= 0 else HEADER
    code = empty_code(flat, header + flat.numel() * width)
    if header:
        code[:8].view(torch.int64).fill_(base)
        code[8:HEADER].view(torch.int64).fill_(width.bit_length() - 1)
    narrow = code[header:].view(UNSIGNED[width])
    if has_kernels("integers", flat.device):
        call("integers", f"narrow_{8 * flat.dtype.itemsize}_{8 * width}", flat, flat.numel(), base, narrow)
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


def decode_integers(code: Tensor, flat: Tensor, max_index: int = -1) -> None:
    check_dtype("decode_integers", flat.dtype, INTEGERS)
    count, base, header = flat.numel(), 0, 0
    if max_index >= 0:
        width = width_for(max_index)
    else:
        header = HEADER
        check_code("decode_integers", code, header)
        base, exponent = code[:HEADER].view(torch.int64).tolist()
        if exponent not in range(4):
            raise OptionError(f"encore::decode_integers was given bytes that encode_integers did not make: {exponent}")
        width = 1 << exponent
    check_code("decode_integers", code, header + count * width)
    narrow = code[header : header + count * width].view(UNSIGNED[width])
    if has_kernels("integers", code.device):
        call("integers", f"widen_{8 * flat.dtype.itemsize}_{8 * width}", narrow, count, base, flat)
    else:
        for first in range(0, count, SLICE):
            part = narrow[first : first + SLICE].to(torch.uint64).view(torch.int64) + base
            flat[first : first + SLICE].copy_(part)


def _most_bytes(count: int, dtype: torch.dtype, max_index: int = -1) -> int:
    return count * width_for(max_index) if max_index >= 0 else HEADER + count * dtype.itemsize


def _expected_bytes(count: int, dtype: torch.dtype, density: float) -> int:
    return HEADER + count * width_at(density, dtype)


def _workspace(count: int, dtype: torch.dtype, device: torch.device, max_index: int = -1) -> int:
    return 0 if is_compiled(device.type) else PLAIN_BYTES * min(count, SLICE)


CODING = Coding(
    "integers", encode_integers, decode_integers, _most_bytes, _workspace,
    options="int max_index=-1", exact=lambda max_index=-1: max_index >= 0,
)  # fmt: skip


def _indices(name: str, words: str, width: int) -> Codec:
    most = (1 << 8 * width) - 1
    dtypes = tuple(dtype for dtype in INTEGERS if width < dtype.itemsize)
    return Codec(name, f"indices up to {most} in {words}", CODING, dtypes, options=(most,), max_index=most)


INTEGER_CODECS = (
    _indices("uint8", "one byte", 1),
    _indices("uint16", "two bytes", 2),
    _indices("uint32", "four bytes", 4),
    Codec(
        "integers", "integers in the fewest bytes that their range allows", CODING, INTEGERS,
        options=(-1,), expected=_expected_bytes, share=Share.NUMBER_BYTES,
    ),
)  # fmt: skip
