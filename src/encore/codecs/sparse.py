"""Non-zeros and a bitmap of where they stood: Gist's sparse storage, dense compute (Jain et al., ISCA 2018).

For outputs of ReLU. A bit an element beats column indices of 8 bits at densities above 1/8. Only elements
whose bits are all zero are left out, so that -0.0 and NaN come back: lossless. `values` may name a format of
`floats.py`, in which the non-zeros are kept: lossy then, by that format's error; zeros stay exact. Of integers, 64
non-zeros share a scale, however far apart they stood.

**Format.** Everything is little-endian. A header of 8 bytes, int64: how many elements are not zero, or -1. Then, unless
it is -1, the bitmap: bit i % 64 of word i // 64 for element i in the order of `layout.py`, 8 ceil(n / 64) bytes. Then
the non-zeros in that order, as they are or in their format. -1 means that this would not be smaller, and all elements
follow, zeros too. So a code never takes more than 8 bytes beyond the elements themselves.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from encore.codecs import native
from encore.codecs.codec import Codec, Coding
from encore.codecs.floats import (
    FORMATS,
    GROUP,
    Small,
    bound_by_group,
    error_bound,
    format_of,
    plain_bytes,
    read_floats,
    write_floats,
)
from encore.codecs.layout import Restored, elements_of
from encore.codecs.native import call, has_kernels, is_compiled
from encore.codecs.operators import check_code, check_dtype, empty_code
from encore.errors import OptionError
from encore.kernels.gpu.tiles import TILE

HEADER = 8
DENSE = -1
THREADS = 256
"""Counts that `sparse.cpp` leaves between its two passes."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16)
PATTERN = {2: torch.int16, 4: torch.int32, 8: torch.int64}
PART = 1 << 20
"""Elements at a time whose non-zeros go to or from a format: what lies in between stays in cache."""
TOGETHER = 3 * GROUP
"""Numbers of which nothing is shared with others in any format: neither a word nor a scale."""
PLAIN_BYTES = 32
"""The workspace of PyTorch's own operators for each element, at most."""


def bitmap_bytes(count: int) -> int:
    return 8 * -(-count // 64)


def value_bytes(count: int, dtype: torch.dtype, values: str) -> int:
    return format_of(values).nbytes(count) if values else count * dtype.itemsize


def sparse_bytes(count: int, non_zero: int, dtype: torch.dtype, values: str) -> int:
    """Bytes of a code."""
    sparse = HEADER + bitmap_bytes(count) + value_bytes(non_zero, dtype, values)
    return min(sparse, HEADER + value_bytes(count, dtype, values))


def _check(name: str, dtype: torch.dtype, values: str) -> None:
    check_dtype(name, dtype, DTYPES)
    if values:
        format_of(values, dtype)


def encode_sparse(flat: Tensor, values: str = "") -> Tensor:
    _check("encode_sparse", flat.dtype, values)
    count, dtype, compiled = flat.numel(), flat.dtype, has_kernels("sparse", flat.device)
    bits, counts = 8 * dtype.itemsize, (ctypes.c_int64 * THREADS)()
    if compiled:
        non_zero = call("sparse", f"count_{bits}", flat, count, counts)
    else:
        present = flat.view(PATTERN[dtype.itemsize]) != 0
        non_zero = int(present.sum())
    code = empty_code(flat, sparse_bytes(count, non_zero, dtype, values))
    body = HEADER + bitmap_bytes(count)
    if body + value_bytes(non_zero, dtype, values) > code.numel():
        code[:HEADER].view(torch.int64).fill_(DENSE)
        _write_values(flat, values, code[HEADER:])
        return code
    code[:HEADER].view(torch.int64).fill_(non_zero)
    bitmap, stored = code[HEADER:body], code[body:]
    if compiled and values and not native.on_gpu(flat):
        _pack_in_parts(flat, bitmap, values, non_zero, stored)
    elif compiled:
        packed = flat.new_empty(non_zero) if values else stored
        call("sparse", f"pack_{bits}", flat, count, counts, bitmap, packed)
        if values:
            _write_values(packed, values, stored)
    else:
        bitmap.fill_(0)
        bitmap[: -(-count // 8)] = torch.ops.encore.encode_bits(present)
        _write_values(flat[present], values, stored)
    return code


def _pack_in_parts(flat: Tensor, bitmap: Tensor, values: str, non_zero: int, stored: Tensor) -> None:
    """Non-zeros into their format, a part of the elements at a time; what the next part shares waits."""
    small, bits, counts = format_of(values), 8 * flat.element_size(), (ctypes.c_int64 * THREADS)()
    count, done, left = flat.numel(), 0, 0
    waiting = flat.new_empty(min(count, PART) + TOGETHER)
    for first in range(0, count, PART):
        part = flat[first : first + PART]
        found = call("sparse", f"count_{bits}", part, part.numel(), counts)
        call("sparse", f"pack_{bits}", part, part.numel(), counts, bitmap[first // 8 :], waiting[left:])
        left += found
        whole = left if first + PART >= count else left - left % TOGETHER
        write_floats(waiting[:whole], small, stored, done, non_zero)
        done, left = done + whole, left - whole
        waiting[:left].copy_(waiting[whole : whole + left])  # these never overlap: either none has gone, or enough


def _unpack_in_parts(bitmap: Tensor, stored: Tensor, values: str, non_zero: int, flat: Tensor) -> bool:
    """The reverse. Returns `False` if the bitmap does not have that many bits."""
    small, count, taken = format_of(values), flat.numel(), 0
    ready = flat.new_empty(min(count, PART) + TOGETHER)
    for first in range(0, count, PART):
        part, words = flat[first : first + PART], bitmap[first // 8 :]
        found = call("sparse", "count_bits", words, -(-part.numel() // 64))
        before = taken % TOGETHER
        if taken + found > non_zero or before + found > ready.numel():
            return False
        read_floats(stored, small, ready[: before + found], taken - before, non_zero)
        call("sparse", f"unpack_{8 * flat.element_size()}", words, ready[before:], part.numel(), found, part)
        taken += found
    return taken == non_zero


def _write_values(flat: Tensor, values: str, into: Tensor) -> None:
    if values:
        write_floats(flat, format_of(values), into)
    else:
        into.copy_(flat.view(torch.uint8))


def decode_sparse(code: Tensor, flat: Tensor, values: str = "") -> None:
    count, dtype = flat.numel(), flat.dtype
    _check("decode_sparse", dtype, values)
    check_code("decode_sparse", code, HEADER)
    non_zero = int(code[:HEADER].view(torch.int64))
    if not DENSE <= non_zero <= count:
        raise _not_a_code(non_zero, count)
    if non_zero == DENSE:
        check_code("decode_sparse", code, HEADER + value_bytes(count, dtype, values))
        _read_values(code[HEADER:], values, flat)
        return
    body = HEADER + bitmap_bytes(count)
    check_code("decode_sparse", code, body + value_bytes(non_zero, dtype, values))
    bitmap, stored = code[HEADER:body], code[body:]
    if has_kernels("sparse", code.device):
        if values and not native.on_gpu(code):
            if not _unpack_in_parts(bitmap, stored, values, non_zero, flat):
                raise _not_a_code(non_zero, count)
            return
        packed = stored
        if values:
            packed = flat.new_empty(non_zero)
            _read_values(stored, values, packed)
        if call("sparse", f"unpack_{8 * dtype.itemsize}", bitmap, packed, count, non_zero, flat):
            raise _not_a_code(non_zero, count)
    else:
        present = torch.ops.encore.decode_bits(bitmap, [count], [1], torch.bool)
        if int(present.sum()) != non_zero:
            raise _not_a_code(non_zero, count)
        packed = flat.new_empty(non_zero)
        _read_values(stored, values, packed)
        flat.zero_()
        flat[present] = packed


def _read_values(stored: Tensor, values: str, flat: Tensor) -> None:
    if values:
        read_floats(stored, format_of(values), flat)
    else:
        flat.view(torch.uint8).copy_(stored[: flat.numel() * flat.element_size()])


def _not_a_code(non_zero: int, count: int) -> OptionError:
    return OptionError(
        f"encore::decode_sparse was given a code that does not fit: {non_zero} non-zeros in {count} elements; decode "
        "with the size, stride and values of the tensor that was encoded"
    )


# ---- the codecs ----------------------------------------------------------------------------------------------------


def _most_bytes(count: int, dtype: torch.dtype, values: str = "") -> int:
    return sparse_bytes(count, count, dtype, values)


def _workspace(count: int, dtype: torch.dtype, device: torch.device, values: str = "") -> int:
    """At most: non-zeros on their way to or from their format. On a GPU that is all of them, if the data is unkind."""
    if not is_compiled(device.type):
        return PLAIN_BYTES * count + plain_bytes(count, dtype, device)
    if device.type == "cuda":
        starts = 8 * (-(-count // TILE) + 1)  # of each tile's non-zeros
        return starts + (count * dtype.itemsize if values else 0)
    return (min(count, PART) + TOGETHER) * dtype.itemsize if values else 0


def _error(small: Small, x: Tensor) -> Tensor:
    """How far off each finite element may be, in float64: groups are of non-zeros, unless all elements are kept."""
    if not small.most:
        return error_bound(small, x)
    flat = elements_of(x.detach())
    present = flat.view(PATTERN[x.dtype.itemsize]) != 0
    count, non_zero = flat.numel(), int(present.sum())
    if HEADER + bitmap_bytes(count) + small.nbytes(non_zero) > sparse_bytes(count, non_zero, x.dtype, small.name):
        return error_bound(small, x)
    restored = Restored(x.shape, x.stride(), torch.float64, x.device)
    restored.flat.zero_()
    restored.flat[present] = bound_by_group(small, flat[present])
    return restored.finish()


CODING = Coding(
    "sparse", encode_sparse, decode_sparse, _most_bytes, _workspace, options='str values=""', exact=lambda *_: False
)


def _codec(values: str) -> Codec:
    def expected(count: int, dtype: torch.dtype, density: float) -> int:
        return sparse_bytes(count, round(count * density), dtype, values)

    return Codec(
        name=f"sparse_{values}" if values else "sparse",
        what=f"non-zeros as {values} and a bitmap" if values else "non-zeros and a bitmap",
        coding=CODING,
        dtypes=FORMATS[values].dtypes if values else DTYPES,
        options=(values,),
        error=functools.partial(_error, FORMATS[values]) if values else None,
        expected=expected,
    )


SPARSE_CODECS = tuple(_codec(values) for values in ("", *FORMATS))
