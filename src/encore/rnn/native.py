"""The steps of recurrent layers in C++: `kernels/recurrent.cpp`, called through ctypes on tensors' addresses.

The structures below mirror those of the C++ file field by field. Buffers are passed as tensors that begin at the
chunk's first row; `plain.py` has the same functions in PyTorch's own operators.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from encore.kernels import BuildError, library
from encore.rnn.sequence import Chunk

SUFFIX = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
VECTOR_BYTES = {"AVX512": 64, "AVX2": 32, "DEFAULT": 32, "NEON": 16, "SVE128": 16, "SVE256": 32}
INT, POINTER = ctypes.c_int64, ctypes.c_void_p


class Steps(ctypes.Structure):
    _fields_ = [("count", INT), ("row", POINTER), ("active", POINTER), ("threads", INT)]


class Entering(ctypes.Structure):
    _fields_ = [("state", POINTER), ("known", INT), ("initial", POINTER)]


def _structure(name: str, integers: tuple[str, ...], *fields: str | tuple[str, Any]) -> type[ctypes.Structure]:
    """A structure of steps, integers, and then pointers unless another type is given."""
    typed = [field if isinstance(field, tuple) else (field, POINTER) for field in fields]
    return type(
        name, (ctypes.Structure,), {"_fields_": [("steps", Steps), *((integer, INT) for integer in integers), *typed]}
    )


LstmForward = _structure(
    "LstmForward", ("hidden", "width"), "inputs", "bias", "weight", "projection", "before", "after", "cell", "raw",
    "output", "gates", "cells",
)  # fmt: skip
LstmRebuild = _structure("LstmRebuild", ("hidden",), "bias", ("enter", Entering), "gates", "cells", "raw")
LstmBackward = _structure(
    "LstmBackward", ("hidden", "width"), "weight", "projection", "grad_output", "grad_row", ("grad_stride", INT),
    "gates", "cells", ("enter", Entering), "grad_gates", "grad_state", "grad_cell", "grad_projected",
)  # fmt: skip
GruForward = _structure(
    "GruForward", ("hidden",), "inputs", "bias", "weight", "before", "after", "output", "gates"
)  # fmt: skip
GruBackward = _structure(
    "GruBackward", ("hidden",), "weight", "grad_output", "grad_row", ("grad_stride", INT), "gates", "previous",
    "grad_gates", "grad_state",
)  # fmt: skip
ElmanForward = _structure(
    "ElmanForward", ("hidden", "relu"), "inputs", "bias", "weight", "before", "after", "output"
)  # fmt: skip
ElmanBackward = _structure(
    "ElmanBackward", ("hidden", "relu"), "weight", "grad_output", "grad_row", ("grad_stride", INT), "output",
    "grad_gates", "grad_state",
)  # fmt: skip


class GruRebuild(ctypes.Structure):
    _fields_ = [("rows", INT), ("hidden", INT), ("threads", INT), ("bias", POINTER), ("gates", POINTER)]


def vector_lanes(dtype: torch.dtype) -> int:
    """Sums of such numbers in a vector register, as the C++ file is compiled for: those of narrow ones are float32."""
    dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    return VECTOR_BYTES.get(torch.backends.cpu.get_cpu_capability(), 32) // dtype.itemsize


@functools.cache
def recurrent_library() -> ctypes.CDLL:
    """The compiled steps; raises `BuildError` where they cannot be had."""
    loaded = library("recurrent")
    for dtype in (torch.float32, torch.float64):
        lanes = getattr(loaded, f"lanes_{SUFFIX[dtype]}")
        lanes.restype = INT
        if lanes() != vector_lanes(dtype):
            raise BuildError(f"vectors were expected to have {vector_lanes(dtype)} lanes of {dtype}, not {lanes()}")
    return loaded


def multiplies(dtype: torch.dtype) -> bool:
    """Do the steps read operands of this narrow type as they are? They do where the processor multiplies them."""
    try:
        return dtype == torch.bfloat16 and hasattr(recurrent_library(), "multiply_rows_bf16")
    except BuildError:
        return False


def temporary_bytes(batch: int, hidden: int, dtype: torch.dtype) -> int:
    """Nothing is allocated here: every buffer is the caller's."""
    return 0


def packed_numel(gates: int, units: int, depth: int, dtype: torch.dtype) -> int:
    """The size of a packed weight: units are padded to whole vectors, narrow numbers to pairs."""
    lanes = vector_lanes(dtype)
    return -(-units // lanes) * lanes * gates * (depth + depth % 2 if dtype == torch.bfloat16 else depth)


def pack(weight: Tensor, gates: int, *, transposed: bool, out: Tensor) -> None:
    """Pack `[gates * units, depth]` for products `h W^T`, or `[depth, units]` for products with W (`transposed`)."""
    depth, units = weight.shape if transposed else (weight.shape[1], weight.shape[0] // gates)
    unit_stride, depth_stride = weight.stride()[::-1] if transposed else weight.stride()
    _function("pack", weight.dtype)(
        INT(gates), POINTER(weight.data_ptr()), INT(units), INT(depth), INT(unit_stride), INT(depth_stride),
        POINTER(out.data_ptr()), INT(torch.get_num_threads()),
    )  # fmt: skip


def add_column_sums(matrix: Tensor, sums: Tensor) -> None:
    """`sums += matrix.sum(0)`."""
    _function("add_column_sums", matrix.dtype)(
        POINTER(matrix.data_ptr()), INT(matrix.shape[0]), INT(matrix.shape[1]), POINTER(sums.data_ptr()),
        INT(torch.get_num_threads()),
    )  # fmt: skip


def multiply_rows(left: Tensor, packed: Tensor, into: Tensor, *, add: bool) -> None:
    """`into = left @ weight`, or added to it: narrow numbers times a weight packed as one gate."""
    _function("multiply_rows", left.dtype, operand=into.dtype)(
        POINTER(left.data_ptr()), INT(left.stride(0)), INT(left.shape[0]), POINTER(packed.data_ptr()),
        INT(into.shape[1]), INT(left.shape[1]), POINTER(into.data_ptr()), INT(into.stride(0)), INT(add),
        INT(torch.get_num_threads()),
    )  # fmt: skip


def multiply_columns(left: Tensor, right: Tensor, into: Tensor, *, add: bool) -> None:
    """`into = left^T @ right`, or added to it: sums of narrow numbers, in float32."""
    _function("multiply_columns", left.dtype)(
        POINTER(left.data_ptr()), INT(left.stride(0)), POINTER(right.data_ptr()), INT(right.stride(0)),
        INT(left.shape[0]), INT(left.shape[1]), INT(right.shape[1]), POINTER(into.data_ptr()), INT(add),
        INT(torch.get_num_threads()),
    )  # fmt: skip


def lstm_forward(
    chunk: Chunk, inputs: Tensor, bias: Tensor, weight: Tensor | None, projection: Tensor | None, before: Tensor,
    after: Tensor, cell: Tensor, raw: Tensor | None, output: Tensor, gates: Tensor | None, cells: Tensor | None,
) -> None:  # fmt: skip
    """Run the steps of a chunk. `inputs` are products with the inputs; `before` and `after` hold h in turns.

    For a single step the caller may have added its recurrent product: there is no `weight` then.
    """
    call = LstmForward(
        _steps(chunk), cell.shape[1], output.shape[1], *_addresses(inputs, bias, weight, projection, before, after),
        *_addresses(cell, raw, output, gates, cells),
    )  # fmt: skip
    _function("lstm_forward", output.dtype, operand=before.dtype)(ctypes.byref(call))


def lstm_rebuild(
    chunk: Chunk, bias: Tensor, enter: Tensor, known: int, initial: Tensor, gates: Tensor, cells: Tensor,
    raw: Tensor | None,
) -> None:  # fmt: skip
    """Turn products with inputs and states into gates, in place, and c from the c that enters the chunk."""
    entering = Entering(enter.data_ptr(), known, initial.data_ptr())
    call = LstmRebuild(
        _steps(chunk), cells.shape[1], bias.data_ptr(), entering, *_addresses(gates, cells, raw)
    )  # fmt: skip
    _function("lstm_rebuild", gates.dtype)(ctypes.byref(call))


def lstm_backward(
    chunk: Chunk, weight: Tensor | None, projection: Tensor | None, grad_output: Tensor | None, gates: Tensor,
    cells: Tensor, enter: Tensor, known: int, initial: Tensor, grad_gates: Tensor, grad_state: Tensor,
    grad_cell: Tensor, grad_projected: Tensor | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Walk the steps of a chunk backwards: the gates' gradients, and those of the states before the chunk.

    Without a `weight`, for a single step, the gradient of h before it is left to the caller.
    """
    grad_rows, grad_stride = _grad_rows(chunk, grad_output)
    entering = Entering(enter.data_ptr(), known, initial.data_ptr())
    call = LstmBackward(
        _steps(chunk), cells.shape[1], grad_state.shape[1], *_addresses(weight, projection, grad_output),
        ctypes.addressof(grad_rows), grad_stride, *_addresses(gates, cells), entering,
        *_addresses(grad_gates, grad_state, grad_cell, grad_projected),
    )  # fmt: skip
    _function("lstm_backward", dtype, kept=gates.dtype, operand=grad_gates.dtype)(ctypes.byref(call))


def gru_forward(
    chunk: Chunk, inputs: Tensor, bias: Tensor, weight: Tensor | None, before: Tensor, after: Tensor, output: Tensor,
    gates: Tensor | None,
) -> None:  # fmt: skip
    call = GruForward(
        _steps(chunk), output.shape[1], *_addresses(inputs, bias, weight, before, after, output, gates)
    )  # fmt: skip
    _function("gru_forward", output.dtype, operand=before.dtype)(ctypes.byref(call))


def gru_rebuild(bias: Tensor, gates: Tensor) -> None:
    """Turn products with inputs and states into gates, in place."""
    rows, width = gates.shape
    call = GruRebuild(rows, width // 4, torch.get_num_threads(), *_addresses(bias, gates))
    _function("gru_rebuild", gates.dtype)(ctypes.byref(call))


def gru_backward(
    chunk: Chunk, weight: Tensor | None, grad_output: Tensor | None, gates: Tensor, previous: Tensor,
    grad_gates: Tensor, grad_state: Tensor, dtype: torch.dtype,
) -> None:  # fmt: skip
    grad_rows, grad_stride = _grad_rows(chunk, grad_output)
    call = GruBackward(
        _steps(chunk), grad_state.shape[1], *_addresses(weight, grad_output), ctypes.addressof(grad_rows), grad_stride,
        *_addresses(gates, previous, grad_gates, grad_state),
    )  # fmt: skip
    _function("gru_backward", dtype, kept=gates.dtype, operand=grad_gates.dtype)(ctypes.byref(call))


def elman_forward(
    chunk: Chunk, relu: bool, inputs: Tensor, bias: Tensor, weight: Tensor | None, before: Tensor, after: Tensor,
    output: Tensor,
) -> None:  # fmt: skip
    call = ElmanForward(
        _steps(chunk), output.shape[1], relu, *_addresses(inputs, bias, weight, before, after, output)
    )  # fmt: skip
    _function("elman_forward", output.dtype, operand=before.dtype)(ctypes.byref(call))


def elman_backward(
    chunk: Chunk, relu: bool, weight: Tensor | None, grad_output: Tensor | None, output: Tensor, grad_gates: Tensor,
    grad_state: Tensor,
) -> None:  # fmt: skip
    grad_rows, grad_stride = _grad_rows(chunk, grad_output)
    call = ElmanBackward(
        _steps(chunk), grad_state.shape[1], relu, *_addresses(weight, grad_output), ctypes.addressof(grad_rows),
        grad_stride, *_addresses(output, grad_gates, grad_state),
    )  # fmt: skip
    _function("elman_backward", output.dtype, operand=grad_gates.dtype)(ctypes.byref(call))


def _function(
    name: str, dtype: torch.dtype, kept: torch.dtype | None = None, operand: torch.dtype | None = None
) -> Any:  # fmt: skip
    """The function for sequences of this type; `kept` is that of gates, `operand` that of what products read."""
    wide = "wide_" if kept is not None and kept != dtype else ""
    narrow = "narrow_" if operand == torch.bfloat16 else ""
    function = getattr(recurrent_library(), f"{name}_{wide}{narrow}{SUFFIX[dtype]}")
    function.restype = None
    return function


def _steps(chunk: Chunk) -> Steps:
    return Steps(
        len(chunk.times), ctypes.addressof(chunk.row), ctypes.addressof(chunk.active), torch.get_num_threads()
    )  # fmt: skip


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _grad_rows(chunk: Chunk, grad_output: Tensor | None) -> tuple[Any, int]:
    """Where the gradients of each step begin in `[T, B, width]` or `[rows, width]`, and how far apart its rows lie."""
    numbers = INT * len(chunk.times)
    if grad_output is None:
        return numbers(), 0
    if grad_output.dim() == 3:
        return numbers(*(time * grad_output.stride(0) for time in chunk.times)), grad_output.stride(1)
    stride = grad_output.stride(0)
    return numbers(*((chunk.first + row) * stride for row in chunk.row)), stride
