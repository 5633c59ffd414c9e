"""One bit an element, the counterpart of `bits.cpp`: masks packed and unpacked, and operators that read packed masks.

Floating-point numbers come as integers of their width if their bits suffice. `count` is the number of elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encore.kernels.gpu.maths import wide


@triton.jit
def _eights(BYTES: tl.constexpr):
    """Elements of a tile, eight for each of its bytes."""
    bytes_ = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)[:, None]
    return bytes_, bytes_ * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _store_bits(code, flags, bytes_, count):
    """Eight flags a row to a byte, the lowest first."""
    places = tl.arange(0, 8)[None, :]
    packed = tl.reduce(flags.to(tl.int32) << places, 1, tl.standard._sum_combine, keep_dims=True)
    tl.store(code + bytes_, packed.to(tl.uint8), bytes_ * 8 < count)


@triton.jit
def _is_set(code, at, inside):
    """The bits of elements."""
    return (tl.load(code + at // 8, inside, 0).to(tl.int32) >> (at % 8).to(tl.int32) & 1) != 0


@triton.jit(do_not_specialize=["count"])
def pack_bools(source, code, count, BYTES: tl.constexpr):
    bytes_, at = _eights(BYTES)
    _store_bits(code, tl.load(source + at, at < count, 0) != 0, bytes_, count)


@triton.jit(do_not_specialize=["count"])
def pack_signs(
    source, code, count, INFINITY: tl.constexpr, SIZE: tl.constexpr, NAN_PASSES: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Above zero, by the bits of a number; NaN counts as `NAN_PASSES` says. `SIZE`: all bits but the sign's."""
    bytes_, at = _eights(BYTES)
    number = tl.load(source + at, at < count, 0)
    flags = number > 0
    if NAN_PASSES:
        flags = flags | ((number & SIZE) > INFINITY)
    else:
        flags = flags & (number <= INFINITY)
    _store_bits(code, flags, bytes_, count)


@triton.jit(do_not_specialize=["count"])
def pack_inside(
    source, code, count, LOW: tl.constexpr, HIGH: tl.constexpr, NAN_PASSES: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    bytes_, at = _eights(BYTES)
    value = wide(tl.load(source + at, at < count, 0.0))
    flags = (value > LOW) & (value < HIGH)
    if NAN_PASSES:
        flags = flags | (value != value)
    _store_bits(code, flags & (at < count), bytes_, count)


@triton.jit(do_not_specialize=["count"])
def unpack(code, out, count, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """`ONE`, the bits of 1, where a bit is set, and 0 elsewhere."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.where(_is_set(code, at, inside), ONE, 0).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def masked(source, code, out, count, BLOCK: tl.constexpr):
    """Elements whose bit is set; 0 elsewhere."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.where(_is_set(code, at, inside), tl.load(source + at, inside, 0), 0), inside)


@triton.jit(do_not_specialize=["count"])
def scaled(source, code, out, count, ONE: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    """Elements times `ONE` where their bit is set, times `OTHER` elsewhere."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = wide(tl.load(source + at, inside, 0.0))
    tl.store(out + at, tl.where(_is_set(code, at, inside), value * ONE, value * OTHER), inside)
