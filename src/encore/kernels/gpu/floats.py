"""Floating-point numbers in fewer bits (16, 10 or 8), and groups of small integers, the counterpart of `floats.cpp`.

Sources and results are float32, bfloat16 or float16, which lie as integers of their width (`KIND`); `count` elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encore.kernels.gpu.narrow import narrowed, read_bits, widened, write_bits


@triton.jit(do_not_specialize=["count"])
def encode_small(
    source, code, count, KIND: tl.constexpr, E: tl.constexpr, M: tl.constexpr, INFINITY: tl.constexpr,
    NAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One code an element."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    codes = narrowed(read_bits(source, at, inside, KIND), E, M, INFINITY, NAN, True)
    tl.store(code + at, codes.to(code.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def decode_small(
    code, out, count, KIND: tl.constexpr, E: tl.constexpr, M: tl.constexpr, INFINITY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bits = widened(tl.load(code + at, inside, 0).to(tl.uint32), E, M, INFINITY)
    write_bits(out, at, bits, inside, KIND)


@triton.jit(do_not_specialize=["count"])
def encode_ten(source, words, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Three codes of ten bits to a word."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = word * 3
    first = narrowed(read_bits(source, at, at < count, KIND), 5, 4, 0x1F0, 0x1F8, True)
    second = narrowed(read_bits(source, at + 1, at + 1 < count, KIND), 5, 4, 0x1F0, 0x1F8, True)
    third = narrowed(read_bits(source, at + 2, at + 2 < count, KIND), 5, 4, 0x1F0, 0x1F8, True)
    together = first | (second << 10) | (third << 20)
    tl.store(words + word, together.to(tl.int32, bitcast=True), at < count)


@triton.jit(do_not_specialize=["count"])
def decode_ten(words, out, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    word = tl.load(words + at // 3, inside, 0).to(tl.uint32, bitcast=True)
    code = (word >> (at % 3 * 10).to(tl.uint32)) & 1023
    write_bits(out, at, widened(code, 5, 4, 0x1F0), inside, KIND)


# ---- groups of 64 integers with a scale ----------------------------------------------------------------------------


@triton.jit
def _largest(bits):
    """Of each row: the bits of the largest finite magnitude, and of the largest of all."""
    size = bits & 0x7FFFFFFF
    finite = tl.where(size < 0x7F800000, size, 0).to(tl.uint32)
    return (
        tl.reduce(finite, 1, tl.standard._elementwise_max, keep_dims=True),
        tl.reduce(size, 1, tl.standard._elementwise_max, keep_dims=True),
    )


@triton.jit
def _scale(largest, any, MOST: tl.constexpr):
    """The scale of each group without its sign, the largest integer that a number may become, and whether any number is
    not finite."""
    special = any >= 0x7F800000
    most = tl.where(special, MOST - 1.0, MOST + 0.0)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), most)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)  # so small: zeros
    return scale, tl.where(scale == 0.0, 0.0, most), special


@triton.jit
def _integers(bits, scale, top, MOST: tl.constexpr):
    value = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.where(scale == 0.0, 1.0, scale))
    value = tl.where(value > top, top, tl.where(value < -top, -top, value))
    near = (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2^23: the last bit is worth 1
    size = bits & 0x7FFFFFFF
    near = tl.where(size == 0x7F800000, tl.where((bits >> 31) != 0, -MOST, MOST), near)
    return tl.where(size > 0x7F800000, -MOST - 1, near)


@triton.jit(do_not_specialize=["count"])
def encode_int8(source, scales, integers, count, KIND: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group * 64 + tl.arange(0, 64)[None, :]
    bits = read_bits(source, at, at < count, KIND)
    largest, any = _largest(bits)
    scale, top, special = _scale(largest, any, 127)
    tl.store(scales + group, tl.where(special, -scale, scale), group * 64 < count)
    tl.store(integers + at, _integers(bits, scale, top, 127).to(tl.int8), at < count)


@triton.jit(do_not_specialize=["count"])
def encode_int4(source, scales, integers, count, KIND: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    pair = group * 32 + tl.arange(0, 32)[None, :]
    even = read_bits(source, pair * 2, pair * 2 < count, KIND)
    odd = read_bits(source, pair * 2 + 1, pair * 2 + 1 < count, KIND)
    largest, any = _largest(even)
    other_largest, other_any = _largest(odd)
    scale, top, special = _scale(tl.maximum(largest, other_largest), tl.maximum(any, other_any), 7)
    tl.store(scales + group, tl.where(special, -scale, scale), group * 64 < count)
    both = (_integers(even, scale, top, 7) & 15) | ((_integers(odd, scale, top, 7) & 15) << 4)
    tl.store(integers + pair, both.to(tl.uint8), pair * 2 < count)


@triton.jit
def _restored(scale, integer, MOST: tl.constexpr):
    """The bits of numbers from their scale, given in bits, and their integers."""
    special = (scale >> 31) != 0
    value = integer.to(tl.float32) * (scale & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    limit = 3.4028234663852886e38
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(special & (integer == MOST), 0x7F800000, bits).to(tl.uint32)
    bits = tl.where(special & (integer == -MOST), 0xFF800000, bits).to(tl.uint32)
    return tl.where(special & (integer == -MOST - 1), 0x7FC00000, bits).to(tl.uint32)


@triton.jit(do_not_specialize=["count"])
def decode_int8(scales, integers, out, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Scales come as int32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scale = tl.load(scales + at // 64, inside, 0).to(tl.uint32, bitcast=True)
    integer = tl.load(integers + at, inside, 0).to(tl.int32)
    write_bits(out, at, _restored(scale, integer, 127), inside, KIND)


@triton.jit(do_not_specialize=["count"])
def decode_int4(scales, integers, out, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scale = tl.load(scales + at // 64, inside, 0).to(tl.uint32, bitcast=True)
    nibble = (tl.load(integers + at // 2, inside, 0).to(tl.int32) >> (at % 2 * 4).to(tl.int32)) & 15
    write_bits(out, at, _restored(scale, (nibble ^ 8) - 8, 7), inside, KIND)
