"""One bit an element: Gist's Binarize (Jain et al., ISCA 2018), for masks and for backward formulas that need no more.

**Format.** Element i, in the order of `layout.py`, is bit i % 8 (the lowest first) of byte i // 8; what is left of the
last byte is zero. ceil(n / 8) bytes, no header. Three encoders make it:

- `encode_bits(x)`: booleans, as they are. `decode_bits` gives them back, or 0 and 1 in any floating-point type.
- `encode_sign(y, nan_passes=True)`: `~(y <= 0)`, what ReLU's backward asks, from its input or its output alike; with
  `nan_passes=False` `y > 0`, what LeakyReLU's asks. Zeros of either sign are not above zero.
- `encode_inside(x, low, high, nan_passes=False)`: `low < x < high`, what the backward of hardtanh and ReLU6 asks.
  (Of NaN, PyTorch's CPU kernel lets gradients through at the end of a row of vectors and nowhere else.)

**Reader.** `masked_by_bits(grad, bits, negative_slope=0.0, stride=None)` is what `threshold_backward`,
`leaky_relu_backward` and `hardtanh_backward` return. It reads the bits where they are. `stride` is that of the tensor
that was encoded, the operand's own by default. Where the two differ, or the operand is not dense, a mask is decoded
into a workspace, and the result is laid out as that of `threshold_backward` (`leaky_relu_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from encore.codecs.codec import Codec, Coding
from encore.codecs.layout import elements_of, is_dense, layout_of, same_walk
from encore.codecs.native import SUFFIX, call, has_kernels, is_compiled
from encore.codecs.operators import WORKSPACES, check_code, check_dtype, define, define_encoder, empty_code
from encore.errors import OptionError

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ONE = {torch.float32: 0x3F800000, torch.float64: 0x3FF << 52, torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
"""The bits of 1."""
INFINITY = {torch.float32: 0x7F800000, torch.float64: 0x7FF << 52, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
SLICE = 1 << 16
"""Elements that are packed at a time by PyTorch's own operators."""
PLAIN_BYTES = 16
"""Their workspace for each element, at most."""


def bit_bytes(count: int, dtype: torch.dtype, *_: object) -> int:
    """Bytes of a code."""
    return -(-count // 8)


def _workspace(count: int, dtype: torch.dtype, device: torch.device, *_: object) -> int:
    return 0 if is_compiled(device.type) else PLAIN_BYTES * min(count, SLICE) + 8


# ---- encoding ------------------------------------------------------------------------------------------------------


def encode_bits(flat: Tensor) -> Tensor:
    check_dtype("encode_bits", flat.dtype, (torch.bool,))
    code = _fresh(flat)
    if has_kernels("bits", flat.device):
        call("bits", "pack_bools", flat, flat.numel(), code)
    else:
        _pack(flat, lambda part: part, code)
    return code


def encode_sign(flat: Tensor, nan_passes: bool = True) -> Tensor:
    check_dtype("encode_sign", flat.dtype, FLOATS)
    code = _fresh(flat)
    if has_kernels("bits", flat.device):
        function = f"pack_signs_{8 * flat.dtype.itemsize}"
        call("bits", function, flat, flat.numel(), INFINITY[flat.dtype], nan_passes, code)
    else:
        _pack(flat, lambda part: ~(part <= 0) if nan_passes else part > 0, code)
    return code


def encode_inside(flat: Tensor, low: float, high: float, nan_passes: bool = False) -> Tensor:
    check_dtype("encode_inside", flat.dtype, FLOATS)
    code = _fresh(flat)
    if has_kernels("bits", flat.device):
        function = f"pack_inside_{SUFFIX[flat.dtype]}"
        call("bits", function, flat, flat.numel(), float(low), float(high), nan_passes, code)
    else:
        wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
        ends = torch.tensor([low, high], dtype=wide, device=flat.device)  # in the type that PyTorch compares in
        _pack(flat, lambda part: _inside(part.to(wide), ends, nan_passes), code)
    return code


def _inside(part: Tensor, ends: Tensor, nan_passes: bool) -> Tensor:
    inside = (part > ends[0]) & (part < ends[1])
    return inside | part.isnan() if nan_passes else inside


def _fresh(flat: Tensor) -> Tensor:
    return empty_code(flat, bit_bytes(flat.numel(), flat.dtype))


def _pack(flat: Tensor, flags_of: Callable[[Tensor], Tensor], code: Tensor) -> None:
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=flat.device)
    for first in range(0, flat.numel(), SLICE):
        flags = flags_of(flat[first : first + SLICE]).to(torch.uint8)
        flags = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(-1, 8)
        code[first // 8 : first // 8 + len(flags)] = (flags * weights).sum(1, dtype=torch.uint8)


def decode_bits(code: Tensor, flat: Tensor) -> None:
    check_dtype("decode_bits", flat.dtype, (torch.bool, *FLOATS))
    check_code("decode_bits", code, bit_bytes(flat.numel(), flat.dtype))
    if has_kernels("bits", code.device):
        call("bits", f"unpack_{8 * flat.dtype.itemsize}", code, flat.numel(), ONE.get(flat.dtype, 1), flat)
        return
    places = torch.arange(8, dtype=torch.uint8, device=code.device)
    for first in range(0, flat.numel(), SLICE):
        part = flat[first : first + SLICE]
        bytes_ = code[first // 8 : first // 8 + -(-part.numel() // 8), None]
        part.copy_((bytes_ >> places & 1).view(-1)[: part.numel()])


ENCODE_SIGN = define_encoder(
    "encode_sign(Tensor y, bool nan_passes=True) -> Tensor", encode_sign, bit_bytes, _workspace
)
ENCODE_INSIDE = define_encoder(
    "encode_inside(Tensor x, float low, float high, bool nan_passes=False) -> Tensor",
    encode_inside, bit_bytes, _workspace,
)  # fmt: skip
CODING = Coding("bits", encode_bits, decode_bits, bit_bytes, _workspace)
BITS = Codec("bits", "one bit an element", CODING, (torch.bool,))


# ---- readers -------------------------------------------------------------------------------------------------------


def masked_by_bits(
    grad: Tensor, bits: Tensor, negative_slope: float = 0.0, stride: Sequence[int] | None = None
) -> Tensor:
    check_dtype("masked_by_bits", grad.dtype, FLOATS)
    if not _in_place(grad, stride) or not has_kernels("bits", grad.device):
        mask = CODING.decode(bits, grad.shape, grad.stride() if stride is None else stride, grad.dtype)
        if negative_slope == 0:
            return aten.threshold_backward(grad, mask, 0)
        return aten.leaky_relu_backward(grad, mask, negative_slope, False)
    out, flat = _like(grad), elements_of(grad)
    check_code("masked_by_bits", bits, -(-flat.numel() // 8))
    if negative_slope == 0:
        call("bits", f"masked_{8 * grad.dtype.itemsize}", flat, bits, flat.numel(), out)
    else:
        function = f"scaled_{SUFFIX[grad.dtype]}"
        call("bits", function, flat, bits, flat.numel(), 1.0, float(negative_slope), out)
    return out


def _in_place(x: Tensor, stride: Sequence[int] | None) -> bool:
    """Return whether the bits can be read along with the operand, element by element in the order of its memory."""
    if stride is not None and len(stride) != x.dim():
        raise OptionError(f"the encoded tensor had {len(stride)} dimensions by its stride, the operand {x.dim()}")
    return is_dense(x.shape, x.stride()) and (stride is None or same_walk(x.shape, x.stride(), stride))


def _like(x: Tensor) -> Tensor:
    """A tensor as a pointwise operator on operands laid out like this one allocates its result."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        if (memory_format is torch.contiguous_format or x.dim() == 4) and x.is_contiguous(memory_format=memory_format):
            return torch.empty_like(x, memory_format=memory_format)
    return torch.empty_like(x)


def _fake_masked(
    grad: Tensor, bits: Tensor, negative_slope: float = 0.0, stride: Sequence[int] | None = None
) -> Tensor:
    if _in_place(grad, stride):
        return _like(grad)
    stride = grad.stride() if stride is None else stride
    mask = torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)
    return aten.threshold_backward(grad, mask, 0)


def _masked_workspace(
    grad: Tensor, bits: Tensor, negative_slope: float = 0.0, stride: Sequence[int] | None = None
) -> int:
    if _in_place(grad, stride) and is_compiled(grad.device.type):
        return 0
    stride = grad.stride() if stride is None else stride
    mask = layout_of(grad.shape, stride).count * grad.dtype.itemsize
    return mask + WORKSPACES[CODING.decode](bits, grad.shape, stride, grad.dtype)


MASKED = define(
    "masked_by_bits(Tensor grad, Tensor bits, float negative_slope=0.0, SymInt[]? stride=None) -> Tensor",
    masked_by_bits, _fake_masked, _masked_workspace,
)  # fmt: skip
