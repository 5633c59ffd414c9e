"""Non-zeros side by side with a bitmap, the counterpart of `sparse.cpp`. An element is zero if all of its bits are.

Elements come as integers of their width. A tile counts its non-zeros; sums of these counts say where the non-zeros of
each tile begin (`starts`), and each tile writes, or reads, its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _eights(BYTES: tl.constexpr):
    """Elements of a tile, eight for each byte of its bitmap."""
    bytes_ = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)[:, None]
    return bytes_, bytes_ * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _places(flags, starts):
    """Where the non-zeros of a tile stand among all, for each of its elements."""
    along = tl.associative_scan(flags, 1, tl.standard._sum_combine)
    whole = tl.reduce(flags, 1, tl.standard._sum_combine, keep_dims=True)
    before = tl.associative_scan(whole, 0, tl.standard._sum_combine) - whole
    return tl.load(starts + tl.program_id(0).to(tl.int64)) + (before + along - 1).to(tl.int64)


@triton.jit(do_not_specialize=["count"])
def count_elements(source, counts, count, BYTES: tl.constexpr):
    """How many elements of each tile are not zero."""
    _bytes, at = _eights(BYTES)
    flags = (tl.load(source + at, at < count, 0) != 0).to(tl.int64)
    whole = tl.reduce(flags, 1, tl.standard._sum_combine)
    tl.store(counts + tl.program_id(0).to(tl.int64), tl.reduce(whole, 0, tl.standard._sum_combine))


@triton.jit(do_not_specialize=["count"])
def count_bits(bitmap, counts, count, BYTES: tl.constexpr):
    """How many bits of each tile are set."""
    bytes_, at = _eights(BYTES)
    byte = tl.load(bitmap + bytes_, bytes_ * 8 < count, 0).to(tl.int32)
    flags = tl.where(at < count, (byte >> tl.arange(0, 8)[None, :]) & 1, 0).to(tl.int64)
    whole = tl.reduce(flags, 1, tl.standard._sum_combine)
    tl.store(counts + tl.program_id(0).to(tl.int64), tl.reduce(whole, 0, tl.standard._sum_combine))


@triton.jit(do_not_specialize=["count"])
def pack(source, starts, bitmap, values, count, BYTES: tl.constexpr):
    bytes_, at = _eights(BYTES)
    element = tl.load(source + at, at < count, 0)
    flags = (element != 0).to(tl.int32)
    tl.store(values + _places(flags, starts), element, flags != 0)
    bits = tl.reduce(flags << tl.arange(0, 8)[None, :], 1, tl.standard._sum_combine, keep_dims=True)
    tl.store(bitmap + bytes_, bits.to(tl.uint8), bytes_ // 8 * 64 < count)  # whole words of 64


@triton.jit(do_not_specialize=["count"])
def unpack(bitmap, starts, values, out, count, BYTES: tl.constexpr):
    bytes_, at = _eights(BYTES)
    inside = at < count
    byte = tl.load(bitmap + bytes_, bytes_ * 8 < count, 0).to(tl.int32)
    flags = tl.where(inside, (byte >> tl.arange(0, 8)[None, :]) & 1, 0)
    tl.store(out + at, tl.load(values + _places(flags, starts), flags != 0, 0), inside)
