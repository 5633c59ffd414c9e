"""Max pooling that remembers where in its window a maximum stood, the counterpart of `pool_map.cpp`.

Results are numbered in the order of memory; `channels` is 1 unless channels lie innermost. Forward goes through the
taps of each result's window: the first of equal maxima wins, the last NaN does. Backward goes through the results that
may have chosen an element, in the order of results: sums are the CPU's but for narrow types, which are rounded once.
Sizes of the input and of the window (`I`, `K`, `S`, `P`, `D`: sizes, kernel, stride, padding, dilation) by axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encore.kernels.gpu.maths import wide, wide_zeros


@triton.jit
def _apart(number, channels, depth, height, width):
    """Plane, coordinates and channel of an element."""
    channel = number % channels
    pixel = number // channels
    column = pixel % width
    row = pixel // width % height
    layer = pixel // width // height % depth
    plane = pixel // width // height // depth
    return plane, layer, row, column, channel


@triton.jit
def _first_tap(result, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr):
    """The first tap that is not in the padding."""
    before = PADDING - result * STRIDE
    return tl.where(before <= 0, 0, (before + DILATION - 1) // DILATION)


@triton.jit
def _pooled(
    x, number, there, channels, ID, IH, IW, OD, OH, OW, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The maximum of each window, and its tap."""
    plane, layer, row, column, channel = _apart(number, channels, OD, OH, OW)
    best = wide_zeros(x, BLOCK) - float("inf")
    tap = (_first_tap(layer, SD, PD, DD) * KH + _first_tap(row, SH, PH, DH)) * KW + _first_tap(column, SW, PW, DW)
    for each in range(KD * KH * KW):
        kw = each % KW
        kh = each // KW % KH
        kd = each // (KW * KH)
        d = layer * SD - PD + kd * DD
        h = row * SH - PH + kh * DH
        w = column * SW - PW + kw * DW
        inside = there & (d >= 0) & (d < ID) & (h >= 0) & (h < IH) & (w >= 0) & (w < IW)
        at = (((plane * ID + d) * IH + h) * IW + w) * channels + channel
        value = wide(tl.load(x + at, inside, float("-inf")))
        better = inside & ((value > best) | (value != value))
        best = tl.where(better, value, best)
        tap = tl.where(better, each, tap)
    return best, tap


@triton.jit(do_not_specialize=["count"])
def pool(
    x, y, map_, count, channels, ID, IH, IW, OD, OH, OW, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = byte * 2 if NARROW else byte
    there = number < count
    best, tap = _pooled(
        x, number, there, channels, ID, IH, IW, OD, OH, OW, KD, KH, KW, SD, SH, SW, PD, PH, PW, DD, DH, DW,
        BLOCK,
    )  # fmt: skip
    tl.store(y + number, best, there)
    if NARROW:
        number = number + 1
        also = number < count
        best, other = _pooled(
            x, number, also, channels, ID, IH, IW, OD, OH, OW, KD, KH, KW, SD, SH, SW, PD, PH, PW, DD, DH, DW,
            BLOCK,
        )  # fmt: skip
        tl.store(y + number, best, also)
        tap = tap | tl.where(also, other << 4, 0)
    tl.store(map_ + byte, tap.to(tl.uint8), there)


@triton.jit(do_not_specialize=["count"])
def pool_backward(
    grad, map_, out, count, channels, ID, IH, IW, OD, OH, OW, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`count` elements of the input, whose gradients are added up."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = number < count
    plane, layer, row, column, channel = _apart(number, channels, ID, IH, IW)
    total = wide_zeros(grad, BLOCK)
    for back in range(KD * KH * KW):
        each = KD * KH * KW - 1 - back  # later taps belong to earlier results
        kw = each % KW
        kh = each // KW % KH
        kd = each // (KW * KH)
        d = layer + PD - kd * DD
        h = row + PH - kh * DH
        w = column + PW - kw * DW
        fits = there & (d >= 0) & (h >= 0) & (w >= 0) & (d % SD == 0) & (h % SH == 0) & (w % SW == 0)
        fits = fits & (d // SD < OD) & (h // SH < OH) & (w // SW < OW)
        at = (((plane * OD + d // SD) * OH + h // SH) * OW + w // SW) * channels + channel
        if NARROW:
            tap = (tl.load(map_ + at // 2, fits, 0).to(tl.int32) >> (at % 2 * 4).to(tl.int32)) & 15
        else:
            tap = tl.load(map_ + at, fits, 0).to(tl.int32)
        chosen = fits & (tap == each)
        total += wide(tl.load(grad + at, chosen, 0.0))
    tl.store(out + number, total, there)
