"""A step's product with the recurrent weight where PyTorch multiplies: one call a step.

Encore's own kernels read a weight that is packed for their tiles (`kernels/recurrent.cpp`). The layouts here leave the
product to PyTorch and the rest of the step to the kernels: the weight as it is **stored**, `h W^T` from `[gates *
hidden, width]`, or **transposed** once a call, so that a product reads rows where it read columns. Which is best
depends on the sizes and the processor: with 32 rows and 512 units on an Ice Lake server, 1.1 ms and 0.5.

The large products of a chunk's rows are PyTorch's, too, unless they read narrow numbers directly: PyTorch would round
their sums to the narrow type, and allocate a workspace that cannot be predicted. Encore's own tiles do neither.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from encore.rnn import native


class LargeProduct(Protocol):
    """Products of a chunk's rows with a weight."""

    def write(self, left: Tensor, into: Tensor) -> None: ...
    def add(self, left: Tensor, into: Tensor) -> None: ...


class StepProduct:
    """`left @ matrix`, for the matrix of one layout."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def write(self, left: Tensor, into: Tensor) -> None:
        torch.mm(left, self._matrix, out=into)

    def add(self, left: Tensor, into: Tensor) -> None:
        into.addmm_(left, self._matrix)


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
    """Products of a chunk's rows with W^T, or with W: PyTorch's, or narrow ones if there is a buffer for the weight."""
    if buffer is not None:
        return NarrowProduct(weight, buffer, transposed=transposed)
    return StepProduct(weight if transposed else weight.t())


def step_product(weight: Tensor, transposed: bool, buffer: Tensor | None) -> StepProduct:
    """Products with W^T, or with W (`transposed`): with the weight as stored, or transposed into the buffer."""
    if buffer is None:
        return StepProduct(weight if transposed else weight.t())
    other = buffer.view(weight.shape[1], weight.shape[0])
    torch.maximum(weight.t(), weight.t(), out=other)  # `copy_` would allocate a workspace
    return StepProduct(other.t() if transposed else other)
