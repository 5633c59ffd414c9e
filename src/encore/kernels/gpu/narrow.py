"""Floating-point numbers of few bits as integers, a twin of `narrow.h`: a sign, E bits of exponent, M bits of mantissa.

Every step is one that is exact, or rounded in one way only, so that codes are the CPU's to the last bit: GPUs convert
NaN as they like. Numbers are the bits of float32, in uint32. `INFINITY` and `NAN` are codes without sign.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrowed(
    bits, E: tl.constexpr, M: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, SATURATE: tl.constexpr
):  # fmt: skip
    """Rounded to nearest, ties to even. `SATURATE`: finite numbers stay finite."""
    size = bits & 0x7FFFFFFF
    code = (size + ((1 << (22 - M)) - 1) + ((size >> (23 - M)) & 1)) >> (23 - M)
    if E != 8:
        code = code - ((128 - (1 << (E - 1))) << M)
        magic = size * 0 + ((152 - (1 << (E - 1)) - M) << 23)  # its last bit is that of the least numbers
        sum = size.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
        code = tl.where(size < ((129 - (1 << (E - 1))) << 23), sum.to(tl.uint32, bitcast=True) - magic, code)
    if SATURATE:
        code = tl.where(code >= INFINITY, INFINITY - 1, code)
    else:
        code = tl.where(code >= INFINITY, INFINITY, code)
    code = tl.where(size == 0x7F800000, INFINITY, code)
    code = tl.where(size > 0x7F800000, NAN, code)
    return (code.to(tl.uint32) | ((bits >> 31) << (E + M))).to(tl.uint32)


@triton.jit
def widened(code, E: tl.constexpr, M: tl.constexpr, INFINITY: tl.constexpr):
    size = code & ((1 << (E + M)) - 1)
    bits = size << (23 - M)
    if E != 8:
        bits = bits + ((128 - (1 << (E - 1))) << 23)
        least = (size * 0 + ((129 - (1 << (E - 1)) - M) << 23)).to(tl.float32, bitcast=True)
        little = size.to(tl.int32).to(tl.float32) * least
        bits = tl.where(size < (1 << M), little.to(tl.uint32, bitcast=True), bits)
    bits = tl.where(size == INFINITY, 0x7F800000, bits)
    bits = tl.where(size > INFINITY, 0x7FC00000, bits)
    return (bits.to(tl.uint32) | ((code >> (E + M)) << 31)).to(tl.uint32)


@triton.jit
def read_bits(source, at, inside, KIND: tl.constexpr):
    """Numbers as float32's bits. They lie as integers of their width; `KIND` is f32, bf16 or f16."""
    raw = tl.load(source + at, inside, 0)
    if KIND == "f32":
        bits = raw.to(tl.uint32, bitcast=True)
    elif KIND == "bf16":
        bits = raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    else:
        bits = widened(raw.to(tl.uint16, bitcast=True).to(tl.uint32), 5, 10, 0x7C00)
    return bits


@triton.jit
def write_bits(out, at, bits, inside, KIND: tl.constexpr):
    """The reverse, rounded to nearest."""
    if KIND == "f32":
        tl.store(out + at, bits.to(tl.int32, bitcast=True), inside)
    elif KIND == "bf16":
        tl.store(out + at, narrowed(bits, 8, 7, 0x7F80, 0x7FC0, False).to(tl.uint16).to(tl.int16, bitcast=True), inside)
    else:
        tl.store(
            out + at, narrowed(bits, 5, 10, 0x7C00, 0x7E00, False).to(tl.uint16).to(tl.int16, bitcast=True), inside
        )
