"""Codecs on GPUs: the functions of `kernels/*.cpp` by the kernels of `kernels/gpu/`, for operands that lie there.

`call` takes what `native.call` does, under the same names; codes are the same to the last bit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encore.codecs.floats import FORMATS, GROUP
from encore.kernels.gpu import bits, floats, integers, pool_map, sparse
from encore.kernels.gpu.launcher import launch
from encore.kernels.gpu.tiles import TILE

BLOCK = TILE
TILE_GROUPS = 16
"""Groups of integers in a tile."""
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
GROUPED = tuple(name for name, small in FORMATS.items() if small.most)
SMALL = tuple(name for name in FORMATS if name not in GROUPED)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes -> the type of a number's bits."""


def call(name: str, function: str, *arguments: Any) -> int:
    """Do what this function of `kernels/<name>.cpp` does."""
    kind = re.sub(r"_(8|16|32|64|f32|f64|bf16|f16)$", "", function)
    return FUNCTIONS[name, kind](*arguments) or 0


# ---- bits ----------------------------------------------------------------------------------------------------------


def _pack_bools(source: Tensor, count: int, code: Tensor) -> None:
    _by_bytes(bits.pack_bools, count, source.view(torch.uint8), code)


def _pack_signs(source: Tensor, count: int, infinity: int, nan_passes: bool, code: Tensor) -> None:
    numbers, size = _bits(source), (1 << (8 * source.element_size() - 1)) - 1
    _by_bytes(bits.pack_signs, count, numbers, code, INFINITY=infinity, SIZE=size, NAN_PASSES=nan_passes)


def _pack_inside(source: Tensor, count: int, low: float, high: float, nan_passes: bool, code: Tensor) -> None:
    _by_bytes(bits.pack_inside, count, source, code, LOW=low, HIGH=high, NAN_PASSES=nan_passes)


def _unpack(code: Tensor, count: int, one: int, out: Tensor) -> None:
    _by_elements(bits.unpack, count, code, _bits(out), ONE=one)


def _masked(source: Tensor, code: Tensor, count: int, out: Tensor) -> None:
    _by_elements(bits.masked, count, _bits(source), code, _bits(out))


def _scaled(source: Tensor, code: Tensor, count: int, one: float, other: float, out: Tensor) -> None:
    _by_elements(bits.scaled, count, source, code, out, ONE=one, OTHER=other)


# ---- sparse --------------------------------------------------------------------------------------------------------


def _count(source: Tensor, count: int, _: Any) -> int:
    return int(_starts(sparse.count_elements, source, count)[-1]) if count else 0


def _pack(source: Tensor, count: int, _: Any, bitmap: Tensor, values: Tensor) -> None:
    """Counts once more: the counts of all tiles have no room between the two calls."""
    if count:
        starts = _starts(sparse.count_elements, source, count)
        _by_bytes(sparse.pack, count, _bits(source), starts, bitmap, _bits(values, source.element_size()))


def _unpack_sparse(bitmap: Tensor, values: Tensor, count: int, non_zero: int, out: Tensor) -> int:
    if count:
        starts = _starts(sparse.count_bits, bitmap, count)
        if int(starts[-1]) != non_zero:
            return -1
        size = out.element_size()
        stored = values.as_strided((non_zero * size // values.element_size(),), (1,))
        _by_bytes(sparse.unpack, count, bitmap, starts, _bits(stored, size), _bits(out))
    return 0


def _starts(kernel: Any, source: Tensor, count: int) -> Tensor:
    """Where the non-zeros of each tile begin among all, and behind them where they end."""
    starts = torch.zeros(-(-count // BLOCK) + 1, dtype=torch.int64, device=source.device)
    _by_bytes(kernel, count, _bits(source), starts[1:])
    return starts.cumsum_(0)


# ---- integers ------------------------------------------------------------------------------------------------------


def _range(source: Tensor, count: int, least: Any, most: Any) -> None:
    low, high = source.aminmax()
    least._obj.value, most._obj.value = int(low), int(high)


def _narrow(source: Tensor, count: int, base: int, out: Tensor) -> None:
    _by_elements(integers.narrow, count, source, _signed(out), base)


def _widen(source: Tensor, count: int, base: int, out: Tensor) -> None:
    _by_elements(integers.widen, count, _signed(source), out, base)


def _signed(tensor: Tensor) -> Tensor:
    """Eight bytes are all of an integer, signed or not."""
    return tensor.view(torch.int64) if tensor.element_size() == 8 else tensor


# ---- floating-point numbers ----------------------------------------------------------------------------------------


def _encode_groups(kernel: str, source: Tensor, count: int, scales: Tensor, integers: Tensor) -> None:
    _launch(getattr(floats, kernel), -(-count // GROUP), TILE_GROUPS, _bits(source), scales.view(torch.float32),
            integers.view(torch.int8), count, KIND=KINDS[source.dtype], GROUPS=TILE_GROUPS)  # fmt: skip


def _decode_groups(kernel: str, scales: Tensor, integers: Tensor, count: int, out: Tensor) -> None:
    operands = (scales.view(torch.int32), integers.view(torch.int8), _bits(out))
    _by_elements(getattr(floats, kernel), count, *operands, KIND=KINDS[out.dtype])


def _encode_floats(name: str, source: Tensor, count: int, code: Tensor) -> None:
    small, numbers, kind = FORMATS[name], _bits(source), KINDS[source.dtype]
    if name == "fp10":
        _launch(floats.encode_ten, -(-count // 3), BLOCK, numbers, _bits(code, 4), count, KIND=kind, BLOCK=BLOCK)
    else:
        constants = {"E": small.exponent, "M": small.mantissa, "INFINITY": small.infinity, "NAN": small.nan}
        _by_elements(floats.encode_small, count, numbers, _codes(name, code), KIND=kind, **constants)


def _decode_floats(name: str, code: Tensor, count: int, out: Tensor) -> None:
    small, numbers, kind = FORMATS[name], _bits(out), KINDS[out.dtype]
    if name == "fp10":
        words = _bits(code[: small.nbytes(count)], 4)
        _by_elements(floats.decode_ten, count, words, numbers, KIND=kind)
    else:
        constants = {"E": small.exponent, "M": small.mantissa, "INFINITY": small.infinity}
        _by_elements(
            floats.decode_small, count, _codes(name, code[: small.nbytes(count)]), numbers, KIND=kind, **constants
        )


def _codes(name: str, code: Tensor) -> Tensor:
    return code if FORMATS[name].nbytes(1) == 1 else code.view(torch.uint16)


# ---- pooling -------------------------------------------------------------------------------------------------------


def _pool(pool: Any, x: Tensor, y: Tensor, map_: Tensor) -> None:
    sizes, constants = _window(pool._obj)
    count, narrow = y.numel(), bool(pool._obj.narrow)
    _launch(pool_map.pool, -(-count // 2) if narrow else count, BLOCK // 2, _flat(x), _flat(y), map_, count, *sizes,
            NARROW=narrow, BLOCK=BLOCK // 2, **constants)  # fmt: skip


def _pool_backward(pool: Any, grad: Tensor, map_: Tensor, out: Tensor) -> None:
    sizes, constants = _window(pool._obj)
    narrow = bool(pool._obj.narrow)
    _launch(pool_map.pool_backward, out.numel(), BLOCK // 2, _flat(grad), map_, _flat(out), out.numel(), *sizes,
            NARROW=narrow, BLOCK=BLOCK // 2, **constants)  # fmt: skip


def _window(pool: Any) -> tuple[tuple[int, ...], dict[str, int]]:
    """Channels and sizes of input and result; and what the window is like, by axis."""
    by_axis = {"K": pool.kernel, "S": pool.stride, "P": pool.padding, "D": pool.dilation}
    constants = {f"{name}{axis}": int(n) for name, all_ in by_axis.items() for axis, n in zip("DHW", all_, strict=True)}
    return (max(1, pool.channels), *pool.inner, *pool.outer), constants


# ---- launching -----------------------------------------------------------------------------------------------------


def _by_bytes(kernel: Any, count: int, *tensors: Tensor, **constants: Any) -> None:
    """A tile of elements with its bytes of bits for each program."""
    _launch(kernel, count, BLOCK, *tensors, count, BYTES=BLOCK // 8, **constants)


def _by_elements(kernel: Any, count: int, *arguments: Any, **constants: Any) -> None:
    _launch(kernel, count, BLOCK, *arguments, count, BLOCK=BLOCK, **constants)


def _launch(kernel: Any, count: int, tile: int, *arguments: Any, **constants: Any) -> None:
    if count:
        launch(kernel, (-(-count // tile),), *arguments, **constants)


def _flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _bits(tensor: Tensor, size: int = 0) -> Tensor:
    """The numbers of a dense tensor as integers of their size, or bytes as integers of this one."""
    return _flat(tensor).view(INTEGERS[size or tensor.element_size()])


FUNCTIONS: dict[tuple[str, str], Callable[..., int | None]] = {
    ("bits", "pack_bools"): _pack_bools,
    ("bits", "pack_signs"): _pack_signs,
    ("bits", "pack_inside"): _pack_inside,
    ("bits", "unpack"): _unpack,
    ("bits", "masked"): _masked,
    ("bits", "scaled"): _scaled,
    ("sparse", "count"): _count,
    ("sparse", "pack"): _pack,
    ("sparse", "unpack"): _unpack_sparse,
    ("integers", "range"): _range,
    **{("integers", f"narrow_{size}"): _narrow for size in (16, 32, 64)},
    **{("integers", f"widen_{size}"): _widen for size in (16, 32, 64)},
    **{("floats", f"encode_{name}"): functools.partial(_encode_floats, name) for name in SMALL},
    **{("floats", f"decode_{name}"): functools.partial(_decode_floats, name) for name in SMALL},
    **{("floats", f"encode_{name}"): functools.partial(_encode_groups, f"encode_{name}") for name in GROUPED},
    **{("floats", f"decode_{name}"): functools.partial(_decode_groups, f"decode_{name}") for name in GROUPED},
    ("pool_map", "pool"): _pool,
    ("pool_map", "pool_backward"): _pool_backward,
}
"""By C++ file and function, without the type that its name ends with."""
