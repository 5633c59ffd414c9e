"""A step's product with the recurrent weight where PyTorch or MKL makes it: one call a step.

Our own kernels read a weight that is packed for their tiles (`kernels/recurrent.cpp`). The layouts here leave the
product to a library and the rest of the step to the kernels: the weight as it is **stored**, `h W^T` from `[gates *
hidden, width]`; **transposed** once a call, so that a product reads rows where it read columns; **prepacked** once a
call by MKL, whose products otherwise arrange the whole weight again at every step; or with states **turned**, `W h^T`,
EcoRNN's layout for GPUs, which turns h before every product and the sums behind it. Which is best depends on the sizes
and the processor: with 32 rows and 512 units on an Ice Lake server, 1.1 ms, 0.5 and 0.36 for the first three.

The large products of a chunk's rows are PyTorch's, too, unless they read narrow numbers as they are: PyTorch would
round their sums to the narrow type, and take memory aside that nobody can tell beforehand. Our own tiles do neither.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from encore.rnn import native

ROW_MAJOR, AS_IT_IS, TRANSPOSED, PACKED = 101, 111, 112, 151
B_MATRIX = 162
"""Names of CBLAS, and of its extension for packed matrices."""
MOST_TIMES = 4
"""A packed weight may be so many times as large as the weight."""


class StepProduct:
    """`left @ matrix`, for the matrix of one layout."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def write(self, left: Tensor, into: Tensor) -> None:
        torch.mm(left, self._matrix, out=into)

    def add(self, left: Tensor, into: Tensor) -> None:
        into.addmm_(left, self._matrix)


class TurnedProduct(StepProduct):
    """The same as `(matrix^T @ left^T)^T`: operands and sums of a product lie the other way, in `buffer`."""

    def __init__(self, matrix: Tensor, buffer: Tensor) -> None:
        super().__init__(matrix.t())
        self._buffer = buffer

    def write(self, left: Tensor, into: Tensor) -> None:
        _transpose(self._turned(left), into)

    def add(self, left: Tensor, into: Tensor) -> None:
        into.add_(self._turned(left).t())

    def _turned(self, left: Tensor) -> Tensor:
        """`matrix^T @ left^T`."""
        (columns, depth), rows = self._matrix.shape, left.shape[0]
        turned = self._buffer[: depth * rows].view(depth, rows)
        _transpose(left, turned)
        sums = self._buffer[depth * rows : (depth + columns) * rows].view(columns, rows)
        return torch.mm(self._matrix, turned, out=sums)


class PrepackedProduct(StepProduct):
    """The same by MKL, from a matrix that it has packed into `buffer`."""

    def __init__(self, matrix: Tensor, rows: int, buffer: Tensor) -> None:
        super().__init__(matrix)
        self._depth, self._columns = matrix.shape
        self._buffer, library = buffer, _packing()
        assert library is not None, "a layout that this machine does not have"
        self._compute = library.cblas_sgemm_compute
        flipped = matrix.stride(0) == 1 and matrix.stride(1) != 1
        library.cblas_sgemm_pack(
            ROW_MAJOR, B_MATRIX, TRANSPOSED if flipped else AS_IT_IS, rows, self._columns, self._depth,
            ctypes.c_float(1.0), _address(matrix), matrix.stride(1 if flipped else 0), _address(buffer),
        )  # fmt: skip

    def write(self, left: Tensor, into: Tensor) -> None:
        self._run(left, into, 0.0)

    def add(self, left: Tensor, into: Tensor) -> None:
        self._run(left, into, 1.0)

    def _run(self, left: Tensor, into: Tensor, beta: float) -> None:
        self._compute(
            ROW_MAJOR, AS_IT_IS, PACKED, left.shape[0], self._columns, self._depth, _address(left), left.stride(0),
            _address(self._buffer), self._columns, ctypes.c_float(beta), _address(into), into.stride(0),
        )  # fmt: skip


class NarrowProduct(StepProduct):
    """`left @ weight^T`, or `left @ weight` (`transposed`), of narrow numbers, from a weight packed into `buffer`."""

    def __init__(self, weight: Tensor, buffer: Tensor, *, transposed: bool = False) -> None:
        super().__init__(buffer)
        native.pack(weight, 1, transposed=transposed, out=buffer)

    def write(self, left: Tensor, into: Tensor) -> None:
        native.multiply_rows(left, self._matrix, into, add=False)

    def add(self, left: Tensor, into: Tensor) -> None:
        native.multiply_rows(left, self._matrix, into, add=True)


def large_product(weight: Tensor, buffer: Tensor | None, *, transposed: bool = False) -> StepProduct:
    """Products of a chunk's rows with W^T, or with W: PyTorch's, or where there is a buffer for it, narrow ones."""
    if buffer is not None:
        return NarrowProduct(weight, buffer, transposed=transposed)
    return StepProduct(weight if transposed else weight.t())


def buffer_numel(layout: str, rows: int, columns: int, depth: int) -> int:
    """What a layout of these takes aside for a matrix `[depth, columns]`."""
    if layout == "transposed":
        return columns * depth
    if layout == "turned":
        return rows * (columns + depth)
    return prepacked_numel(rows, columns, depth) if layout == "prepacked" else 0


def step_product(layout: str, weight: Tensor, transposed: bool, rows: int, buffer: Tensor | None) -> StepProduct:
    """Products of up to `rows` rows with W^T, or with W (`transposed`), by way of the buffer that the layout takes."""
    matrix = weight if transposed else weight.t()
    if layout == "transposed":
        assert buffer is not None
        other = buffer.view(weight.shape[1], weight.shape[0])
        _transpose(weight, other)
        return StepProduct(other.t() if transposed else other)
    if layout == "turned":
        assert buffer is not None
        return TurnedProduct(matrix, buffer)
    if layout == "prepacked":
        assert buffer is not None
        return PrepackedProduct(matrix, rows, buffer)
    return StepProduct(matrix)


def _transpose(matrix: Tensor, into: Tensor) -> None:
    """Write `matrix^T`, without the memory that `copy_` would take aside for it."""
    torch.maximum(matrix.t(), matrix.t(), out=into)


def has_prepacked(dtype: torch.dtype, device: str) -> bool:
    """Does this machine have that layout?"""
    return device == "cpu" and dtype == torch.float32 and _packing() is not None


def worth_prepacking(rows: int, columns: int, depth: int) -> bool:
    """Is it a fair price in memory? MKL asks for 8 MB at least, however small the weight."""
    return prepacked_numel(rows, columns, depth) <= MOST_TIMES * columns * depth


@functools.lru_cache(maxsize=256)
def prepacked_numel(rows: int, columns: int, depth: int) -> int:
    library = _packing()
    assert library is not None, "a layout that this machine does not have"
    return -(-int(library.cblas_sgemm_pack_get_size(B_MATRIX, rows, columns, depth)) // 4)


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _packing() -> Any:
    """PyTorch's library, if it was built with an MKL that packs matrices for its callers."""
    if not torch.backends.mkl.is_available():
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.cblas_sgemm_pack_get_size.restype = ctypes.c_size_t
        for name in ("cblas_sgemm_pack", "cblas_sgemm_compute"):
            getattr(library, name).restype = None
    except (OSError, AttributeError):
        return None
    return library
