"""Lossless compression of dense feature maps: a question first, and a codec only where the answer is yes.

Dense floating-point maps hardly compress as they are; their exponents do, where numbers are of similar size. Byte
planes (all first bytes, all second bytes, ...) bring them together, and a general compressor does the rest. What that
saves is mostly less than a fifth, at a hundredth of memory's speed (`docs/codecs.md` has it by workload). So the codec
is not in the table, and in no plan: `probe` asks a sample, and `offered` hands the codec out to whoever wants it where
it saves enough and keeps up with what would else be done.

**Format.** A header of 8 bytes, int64: how many bytes follow, or -1. Then the planes, compressed by zlib; or, with -1,
where that would not be smaller, the elements as they are. Little-endian, elements in the order of `layout.py`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encore.codecs.codec import Codec
from encore.codecs.layout import Restored, elements_of, gathered_bytes, layout_of
from encore.codecs.operators import check_code, check_dtype, define, empty_code, fake_code, fake_decoded
from encore.errors import OptionError

HEADER = 8
AS_THEY_ARE = -1
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

SAMPLE = 1 << 18
"""Bytes of a sample: enough for a compressor's window, and milliseconds."""
LEVEL = 1
LEAST_RATIO = 1.3
"""Bytes before over bytes after: for less, nobody should wait."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What compressing a sample gave."""

    ratio: float
    """Bytes before over bytes after."""
    encode_rate: float
    """Bytes of the feature map a second, on one thread."""
    decode_rate: float

    def pays(self, rate: float) -> bool:
        """Is it worth it beside something that moves `rate` bytes a second: a copy, a disk, computing again?"""
        return self.ratio >= LEAST_RATIO and min(self.encode_rate, self.decode_rate) >= rate


def byte_planes(x: Tensor) -> bytes:
    """The bytes of a tensor's elements, all first ones first."""
    flat = elements_of(x.detach())
    return flat.contiguous().view(torch.uint8).view(-1, flat.element_size()).t().contiguous().numpy().tobytes()


def from_planes(planes: bytes, dtype: torch.dtype) -> Tensor:
    """The elements again, in the order of `layout.py`."""
    by_plane = torch.frombuffer(bytearray(planes), dtype=torch.uint8).view(dtype.itemsize, -1)
    return by_plane.t().contiguous().view(-1).view(dtype)


def encode_planes(x: Tensor) -> Tensor:
    check_dtype("encode_planes", x.dtype, DTYPES)
    flat = elements_of(x).cpu()
    packed = zlib.compress(byte_planes(flat), LEVEL)
    nbytes = flat.numel() * x.dtype.itemsize
    code = empty_code(x, HEADER + min(len(packed), nbytes))
    small = len(packed) < nbytes
    code[:HEADER].view(torch.int64).fill_(len(packed) if small else AS_THEY_ARE)
    if nbytes:
        code[HEADER:] = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if small else flat.view(torch.uint8)
    return code


def decode_planes(code: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    check_dtype("decode_planes", dtype, DTYPES)
    check_code("decode_planes", code, HEADER)
    restored = Restored(size, stride, dtype, code.device)
    nbytes = restored.flat.numel() * dtype.itemsize
    length = int(code[:HEADER].view(torch.int64))
    check_code("decode_planes", code, HEADER + (nbytes if length == AS_THEY_ARE else max(length, 0)))
    if length == AS_THEY_ARE:
        restored.flat.view(torch.uint8).copy_(code[HEADER : HEADER + nbytes])
        return restored.finish()
    try:
        planes = zlib.decompress(code[HEADER : HEADER + length].cpu().numpy().tobytes())
    except zlib.error as error:
        raise OptionError(f"encore::decode_planes was given bytes that encode_planes did not make: {error}") from error
    if len(planes) != nbytes:
        raise OptionError(f"encore::decode_planes found {len(planes)} bytes where size and stride call for {nbytes}")
    if nbytes:
        restored.flat.copy_(from_planes(planes, dtype))
    return restored.finish()


def _most_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    return HEADER + layout_of(size, stride).count * dtype.itemsize


def _encode_workspace(x: Tensor) -> int:
    """The planes and what they became, and a copy of either."""
    return 3 * _most_bytes(x.shape, x.stride(), x.dtype) + gathered_bytes(x.shape, x.stride(), x.dtype)


def _decode_workspace(code: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    return 3 * _most_bytes(size, stride, dtype) + gathered_bytes(size, stride, dtype)


ENCODE = define(
    "encode_planes(Tensor x) -> Tensor",
    encode_planes,
    lambda x: fake_code(x, _most_bytes(x.shape, x.stride(), x.dtype)),
    _encode_workspace,
)
DECODE = define(
    "decode_planes(Tensor code, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor",
    decode_planes, fake_decoded, _decode_workspace,
)  # fmt: skip


def _nbytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, density: float | None = None) -> int:
    return _most_bytes(shape, stride, dtype)


PLANES = Codec(
    name="planes",
    what="byte planes, compressed",
    lossless=True,
    encode=ENCODE,
    decode=DECODE,
    accepts=lambda shape, dtype: dtype in DTYPES,
    nbytes=_nbytes,
    exact_size=False,
)


# ---- does it pay? --------------------------------------------------------------------------------------------------


def probe(x: Tensor) -> Probe:
    """Compress a sample of a feature map, bring it back, and tell what that gave and took."""
    if x.numel() == 0 or x.device.type != "cpu":
        raise OptionError("a probe needs some elements, on the CPU: pass a feature map of the model's own")
    flat = elements_of(x.detach())
    count = min(flat.numel(), SAMPLE // x.dtype.itemsize)
    middle = (flat.numel() - count) // 2
    sample = flat[middle : middle + count]
    nbytes = count * x.dtype.itemsize
    started = time.perf_counter()
    code = zlib.compress(byte_planes(sample), LEVEL)
    encoded = time.perf_counter()
    back = from_planes(zlib.decompress(code), x.dtype)
    decoded = time.perf_counter()
    if not torch.equal(back.view(torch.uint8), sample.contiguous().view(torch.uint8)):
        raise OptionError("a sample did not come back from its byte planes: a bug in Encore, please report it")
    return Probe(nbytes / len(code), nbytes / (encoded - started), nbytes / (decoded - encoded))


def offered(x: Tensor, rate: float) -> Codec | None:
    """The codec, if it pays for feature maps like this one beside something that moves `rate` bytes a second."""
    return PLANES if probe(x).pays(rate) else None
