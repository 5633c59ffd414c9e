"""Floating-point numbers in fewer bits: Gist's delayed precision reduction (Jain et al., ISCA 2018). Lossy.

Forward reads the numbers as they are; what backward reads is off by a bounded error (`error_bound`). Numbers are
rounded to nearest, ties to even; what lies beyond the largest finite number becomes that number, infinities stay
infinite and NaN stays NaN (its sign stays, its payload does not).

**Formats.** n elements in the order of `layout.py`, no header, everything little-endian.

| name | sign, exponent, mantissa | largest | bytes |
|---|---|---|---|
| `fp16` | 1, 5, 10: IEEE half | 65504 | 2 n |
| `bf16` | 1, 8, 7 | 3.39e38 | 2 n |
| `fp10` | 1, 5, 4 as in IEEE | 63488 | 4 ceil(n / 3): element 3 i + j is bits 10 j to 10 j + 9 of word i |
| `fp8_e4m3` | 1, 4, 3, bias 7; 0x7f is NaN and 0x7e infinity | 416 | n |
| `fp8_e5m2` | 1, 5, 2 as in IEEE | 57344 | n |
| `int8` | a float32 scale for each 64 elements, and integers | any | 4 ceil(n / 64) + n |
| `int4` | the same; two to a byte, the lower half first | any | 4 ceil(n / 64) + ceil(n / 2) |

`fp8_e4m3` is PyTorch's float8_e4m3fn except that 448 makes room for infinity.

Integers: the scales come first. A scale is the largest finite magnitude of its group divided by 127 (by 7), in float32,
and 0 where that is less than 2^-126; an element is the scale times its integer. Where a group has numbers that are not
finite, its scale is divided by 126 (by 6) instead and stored with a minus sign: 127 and -127 (7 and -7) are the
infinities then, and -128 (-8) is NaN.

`fp16` and `bf16` encode float32; the others also bfloat16 and float16, by way of float32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from encore.codecs.codec import Codec, Coding
from encore.codecs.layout import Restored, elements_of
from encore.codecs.native import SUFFIX, call, has_kernels, is_compiled
from encore.codecs.operators import check_code, check_dtype, empty_code
from encore.errors import OptionError, listed

GROUP = 64
TINY = 2.0**-126
SLICE = 3 << 14
"""Elements that are converted at a time by PyTorch's own operators: a multiple of 3 and of `GROUP`."""
PLAIN_BYTES = 64
"""Their workspace for each element, at most."""
WIDE, NARROW = (torch.float32,), (torch.float32, torch.bfloat16, torch.float16)
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of rounding to a type."""


@dataclass(frozen=True, slots=True)
class Small:
    """A floating-point format by its bits."""

    name: str
    exponent: int
    mantissa: int
    dtypes: tuple[torch.dtype, ...]
    most: int = 0
    """Not 0: no such format, but groups of integers up to this."""

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def infinity(self) -> int:
        return 0x7E if (self.exponent, self.mantissa) == (4, 3) else ((1 << self.exponent) - 1) << self.mantissa

    @property
    def nan(self) -> int:
        return 0x7F if (self.exponent, self.mantissa) == (4, 3) else self.infinity | 1 << (self.mantissa - 1)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        code = self.infinity - 1
        exponent, mantissa = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        return math.ldexp(1 + mantissa / (1 << self.mantissa), exponent - self.bias)

    def places(self, code: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
        """Where the elements from `first` on, of so many in all, lie in a code: their scales and integers, or one run.
        No word and no group may begin before and end behind that."""
        if not self.most:
            return (code[self.nbytes(first) :],)
        scales = 4 * -(-count // GROUP)
        return code[first // GROUP * 4 : scales], code[scales + (first if self.most > 7 else first // 2) :]

    def nbytes(self, count: int) -> int:
        if self.most:
            return 4 * -(-count // GROUP) + (count if self.most > 7 else -(-count // 2))
        return 4 * -(-count // 3) if self.name == "fp10" else count * ((1 + self.exponent + self.mantissa) // 8)


FORMATS = {
    small.name: small
    for small in (
        Small("fp16", 5, 10, WIDE),
        Small("bf16", 8, 7, WIDE),
        Small("fp10", 5, 4, NARROW),
        Small("fp8_e4m3", 4, 3, NARROW),
        Small("fp8_e5m2", 5, 2, NARROW),
        Small("int8", 0, 0, NARROW, most=127),
        Small("int4", 0, 0, NARROW, most=7),
    )
}


def format_of(name: str, dtype: torch.dtype | None = None) -> Small:
    """The format by its name, for numbers of a type that it can encode."""
    if name not in FORMATS:
        raise OptionError(f"there is no format {name!r} of small floating-point numbers; there are {listed(FORMATS)}")
    if dtype is not None:
        check_dtype(f"encode_floats({name})", dtype, FORMATS[name].dtypes)
    return FORMATS[name]


def error_bound(small: Small, x: Tensor) -> Tensor:
    """How far off each finite element may be, in float64."""
    x = x.detach()
    if not small.most:
        size = x.abs().double()
        rounding = (size * 2.0 ** -(small.mantissa + 1)).clamp_min(2.0 ** (-small.bias - small.mantissa))
        return torch.where(size > small.largest, size - small.largest, rounding)
    restored = Restored(x.shape, x.stride(), torch.float64, x.device)
    restored.flat.copy_(bound_by_group(small, elements_of(x)))  # groups follow memory
    return restored.finish()


def bound_by_group(small: Small, flat: Tensor) -> Tensor:
    """The same for a run of numbers in groups of integers."""
    padded = torch.nn.functional.pad(flat.double().abs(), (0, -flat.numel() % GROUP)).view(-1, GROUP)
    finite = padded.isfinite()
    largest = padded.where(finite, 0).amax(1)
    scale = largest / (small.most - (~finite).any(1).double())
    rounding = largest.clamp_min(torch.finfo(flat.dtype).tiny) * HALF_STEP[flat.dtype] * 1.01
    bound = scale * (0.5 + 2.0**-12) + rounding + small.most * TINY
    return bound.repeat_interleave(GROUP)[: flat.numel()]


# ---- the operators -------------------------------------------------------------------------------------------------


def encode_floats(flat: Tensor, format: str) -> Tensor:
    small = format_of(format, flat.dtype)
    return write_floats(flat, small, empty_code(flat, small.nbytes(flat.numel())))


def decode_floats(code: Tensor, flat: Tensor, format: str) -> None:
    small = format_of(format, flat.dtype)
    check_code("decode_floats", code, small.nbytes(flat.numel()))
    read_floats(code, small, flat)


def write_floats(flat: Tensor, small: Small, code: Tensor, first: int = 0, count: int | None = None) -> Tensor:
    """Encode a run of numbers into bytes that have been allocated; they may be some out of `count`, from `first` on."""
    count = flat.numel() if count is None else count
    if has_kernels("floats", flat.device):
        function = f"encode_{small.name}_{SUFFIX[flat.dtype]}"
        call("floats", function, flat, flat.numel(), *small.places(code, first, count))
        return code
    for begin in range(0, flat.numel(), SLICE):
        numbers = flat[begin : begin + SLICE].to(torch.float32)
        run, *rest = small.places(code, first + begin, count)
        if small.most:
            scale, integers = _quantised(numbers, small.most)
            run[: 4 * len(scale)].view(torch.float32).copy_(scale)
            rest[0][: len(integers)] = integers
        else:
            bits = _narrowed(numbers, small)
            if small.name == "fp10":
                bits = torch.nn.functional.pad(bits, (0, -len(bits) % 3)).view(-1, 3)
                bits = bits[:, 0] | bits[:, 1] << 10 | bits[:, 2] << 20
            lane = _lane(small)
            run[: len(bits) * lane.itemsize].view(lane).copy_(bits)
    return code


def read_floats(code: Tensor, small: Small, flat: Tensor, first: int = 0, count: int | None = None) -> None:
    """Decode a run of numbers into memory that has been allocated; they may be some out of `count`, from `first` on."""
    count = flat.numel() if count is None else count
    if has_kernels("floats", flat.device):
        function = f"decode_{small.name}_{SUFFIX[flat.dtype]}"
        call("floats", function, *small.places(code, first, count), flat.numel(), flat)
        return
    for begin in range(0, flat.numel(), SLICE):
        part = flat[begin : begin + SLICE]
        run, *rest = small.places(code, first + begin, count)
        if small.most:
            scale = run[: 4 * -(-len(part) // GROUP)].view(torch.float32)
            integers = rest[0][: len(part) if small.most > 7 else -(-len(part) // 2)]
            part.copy_(_restored(scale, integers, small.most, len(part)))
        else:
            lane = _lane(small)
            bits = run[: small.nbytes(len(part))].view(lane).to(torch.int64)
            if small.name == "fp10":
                bits = torch.stack([bits, bits >> 10, bits >> 20], 1).view(-1)[: len(part)] & 1023
            part.copy_(_widened(bits, small))


def _lane(small: Small) -> torch.dtype:
    if small.name == "fp10":
        return torch.int32  # the two bits on top are not used
    return torch.uint8 if small.exponent + small.mantissa < 8 else torch.uint16


# ---- without a compiler --------------------------------------------------------------------------------------------


def _narrowed(numbers: Tensor, small: Small) -> Tensor:
    """As `narrow.h` has it, in int64."""
    bits = numbers.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    size, shift = bits & 0x7FFFFFFF, 23 - small.mantissa
    code = (size + ((1 << (shift - 1)) - 1) + (size >> shift & 1)) >> shift
    if small.bias != 127:
        code -= (127 - small.bias) << small.mantissa
        magic = torch.tensor(2.0 ** (24 - small.bias - small.mantissa), device=numbers.device)
        little = (numbers.abs() + magic).view(torch.int32).to(torch.int64) - magic.view(torch.int32)
        code = torch.where(size < (128 - small.bias) << 23, little, code)
    code = code.clamp_max(small.infinity - 1)
    code = torch.where(size == 0x7F800000, small.infinity, code)
    code = torch.where(size > 0x7F800000, small.nan, code)
    return code | bits >> 31 << (small.exponent + small.mantissa)


def _widened(code: Tensor, small: Small) -> Tensor:
    size = code & ((1 << (small.exponent + small.mantissa)) - 1)
    bits = (size << (23 - small.mantissa)) + ((127 - small.bias) << 23)
    least = 2.0 ** (1 - small.bias - small.mantissa)
    little = size.to(torch.float32) * torch.tensor(least, device=code.device)
    bits = torch.where(size < 1 << small.mantissa, little.view(torch.int32).to(torch.int64), bits)
    bits = torch.where(size == small.infinity, 0x7F800000, bits)
    bits = torch.where(size > small.infinity, 0x7FC00000, bits)
    return (bits | code >> (small.exponent + small.mantissa) << 31).to(torch.int32).view(torch.float32)


def _quantised(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    padded = torch.nn.functional.pad(numbers, (0, -numbers.numel() % GROUP)).view(-1, GROUP)
    finite = padded.isfinite()
    special = ~finite.all(1)
    top = torch.where(special, most - 1, most).to(torch.float32)
    scale = padded.abs().where(finite, 0).amax(1) / top
    scale = scale.where(scale >= TINY, 0)
    top = top.where(scale > 0, 0)[:, None]
    integers = padded.where(finite, 0) / scale.where(scale > 0, 1)[:, None]
    integers = torch.minimum(torch.maximum(integers, -top), top).round_().to(torch.int8)
    integers = torch.where(padded == math.inf, most, torch.where(padded == -math.inf, -most, integers))
    integers = torch.where(padded.isnan(), -most - 1, integers).to(torch.int8).view(-1)[: numbers.numel()]
    scale = torch.where(special, -scale, scale)
    if most > 7:
        return scale, integers.view(torch.uint8)
    pairs = torch.nn.functional.pad(integers.view(torch.uint8) & 15, (0, numbers.numel() % 2)).view(-1, 2)
    return scale, pairs[:, 0] | pairs[:, 1] << 4


def _restored(scale: Tensor, integers: Tensor, most: int, count: int) -> Tensor:
    if most > 7:
        small = integers.view(torch.int8)
    else:
        small = torch.stack([integers << 4, integers & 0xF0], 1).view(torch.int8).view(-1)[:count] >> 4
    largest = torch.finfo(torch.float32).max
    spread = scale.repeat_interleave(GROUP)[:count]
    numbers = (small.to(torch.float32) * spread.abs()).clamp_(-largest, largest)
    special = spread.signbit()
    numbers = torch.where(special & (small == most), math.inf, numbers)
    numbers = torch.where(special & (small == -most), -math.inf, numbers)
    return torch.where(special & (small == -most - 1), math.nan, numbers)


# ---- the codecs ----------------------------------------------------------------------------------------------------


def plain_bytes(count: int, dtype: torch.dtype, device: torch.device, *_: object) -> int:
    """The workspace of PyTorch's own operators for so many numbers, at most."""
    return 0 if is_compiled(device.type) else PLAIN_BYTES * min(count, SLICE)


def _nbytes(count: int, dtype: torch.dtype, format: str) -> int:
    return format_of(format).nbytes(count)


CODING = Coding("floats", encode_floats, decode_floats, _nbytes, plain_bytes, options="str format")


def _codec(small: Small) -> Codec:
    what = {"fp10": "10 bits, three to a word"}.get(small.name, f"{small.name} numbers")
    if small.most:
        what = f"integers of {4 if small.most == 7 else 8} bits, a scale for every {GROUP}"
    error = functools.partial(error_bound, small)
    return Codec(small.name, what, CODING, small.dtypes, options=(small.name,), error=error)


FLOAT_CODECS = tuple(_codec(small) for small in FORMATS.values())
