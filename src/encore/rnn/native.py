"""The steps of recurrent layers in C++: `kernels/recurrent.cpp`, called through ctypes on tensors' addresses.

The structures of the C++ file are words of eight bytes, which `WORDS` lists in order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from encore.kernels import BuildError, library
from encore.rnn.sequence import Chunk
from encore.rnn.steps import BackwardSteps, ForwardSteps, RebuiltGates

SUFFIX = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
VECTOR_BYTES = {"AVX512": 64, "AVX2": 32, "DEFAULT": 32, "NEON": 16, "SVE128": 16, "SVE256": 32}
INT, POINTER = ctypes.c_int64, ctypes.c_void_p

WORDS = {
    "lstm_forward": "steps hidden width inputs bias weight projection before after cell raw output gates cells resets",
    "lstm_rebuild": "steps hidden bias entering gates cells raw resets",
    "lstm_backward": "steps hidden width weight projection grad_output gates cells entering grad_gates grad_state "
    "grad_cell grad_projected resets",
    "gru_forward": "steps hidden inputs bias weight before after output gates resets",
    "gru_rebuild": "rows hidden threads bias gates",
    "gru_backward": "steps hidden weight grad_output gates previous grad_gates grad_state resets",
    "elman_forward": "steps hidden relu inputs bias weight before after output resets",
    "elman_backward": "steps hidden relu weight grad_output output grad_gates grad_state resets",
}
"""Attributes of `ForwardSteps`, `RebuiltGates` or `BackwardSteps` by function, as its structure has them."""


def vector_lanes(dtype: torch.dtype) -> int:
    """Sums of such numbers in a vector register, as the C++ file is compiled for: those of narrow ones are float32."""
    dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    return VECTOR_BYTES.get(torch.backends.cpu.get_cpu_capability(), 32) // dtype.itemsize


@functools.cache
def recurrent_library() -> ctypes.CDLL:
    """The compiled steps; raises `BuildError` if they are not available."""
    loaded = library("recurrent")
    for dtype in (torch.float32, torch.float64):
        lanes = getattr(loaded, f"lanes_{SUFFIX[dtype]}")
        lanes.restype = INT
        if lanes() != vector_lanes(dtype):
            raise BuildError(f"vectors were expected to have {vector_lanes(dtype)} lanes of {dtype}, not {lanes()}")
    return loaded


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether the steps read operands of this narrow type directly: the processor has to multiply them."""
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
    depth, units = weight.shape if transposed else (weight.shape[1], weight.shape[0] // gates)
    unit_stride, depth_stride = weight.stride()[::-1] if transposed else weight.stride()
    _function("pack", weight.dtype)(
        INT(gates), POINTER(weight.data_ptr()), INT(units), INT(depth), INT(unit_stride), INT(depth_stride),
        POINTER(out.data_ptr()), INT(torch.get_num_threads()),
    )  # fmt: skip


def add_column_sums(matrix: Tensor, sums: Tensor) -> None:
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


def forward(cell: str, steps: ForwardSteps) -> None:
    _run(f"{cell}_forward", steps, steps.output.dtype, operand=steps.before.dtype)


def rebuild(cell: str, steps: RebuiltGates) -> None:
    _run(f"{cell}_rebuild", steps, steps.gates.dtype)


def backward(cell: str, steps: BackwardSteps) -> None:
    kept = None if steps.gates is None else steps.gates.dtype
    _run(f"{cell}_backward", steps, steps.dtype, kept, steps.grad_gates.dtype)


def _run(
    name: str, steps: ForwardSteps | RebuiltGates | BackwardSteps, dtype: torch.dtype,
    kept: torch.dtype | None = None, operand: torch.dtype | None = None,
) -> None:  # fmt: skip
    alive: list[Any] = []
    words = [word for field in WORDS[name].split() for word in _words(steps, field, alive)]
    _function(name, dtype, kept, operand)((INT * len(words))(*words))


def _function(
    name: str, dtype: torch.dtype, kept: torch.dtype | None = None, operand: torch.dtype | None = None
) -> Any:  # fmt: skip
    """The function for sequences of this type; `kept` is that of gates, `operand` that of what products read."""
    wide = "wide_" if kept is not None and kept != dtype else ""
    narrow = "narrow_" if operand == torch.bfloat16 else ""
    function = getattr(recurrent_library(), f"{name}_{wide}{narrow}{SUFFIX[dtype]}")
    function.restype = None
    return function


def _words(steps: Any, field: str, alive: list[Any]) -> Iterator[int]:
    """One attribute as numbers and addresses (0 for None); arrays that have to outlive the call go to `alive`."""
    if field == "threads":
        yield torch.get_num_threads()
    elif field == "steps":
        chunk = steps.chunk
        yield from (len(chunk.times), ctypes.addressof(chunk.row), ctypes.addressof(chunk.active))
        yield torch.get_num_threads()
    elif field == "entering":
        entering = steps.entering
        yield from (entering.state.data_ptr(), entering.known, entering.initial.data_ptr())
    elif field == "grad_output":
        rows, stride = _gradient_rows(steps.chunk, steps.grad_output)
        alive.append(rows)
        yield from (_word(steps.grad_output), ctypes.addressof(rows), stride)
    else:
        yield _word(getattr(steps, field))


def _word(value: Tensor | int | None) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else int(value or 0)


def _gradient_rows(chunk: Chunk, grad_output: Tensor | None) -> tuple[Any, int]:
    """Where the gradients of each step begin in `[T, B, width]` or `[rows, width]`, and the stride of their rows."""
    numbers = INT * len(chunk.times)
    if grad_output is None:
        return numbers(), 0
    if grad_output.dim() == 3:
        return numbers(*(time * grad_output.stride(0) for time in chunk.times)), grad_output.stride(1)
    stride = grad_output.stride(0)
    return numbers(*((chunk.first + row) * stride for row in chunk.row)), stride
