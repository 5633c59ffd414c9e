"""The steps of recurrent layers on GPUs: the same functions as `native.py`, with cells by `kernels/gpu/recurrent.py`.

The product with the recurrent weight is PyTorch's, one a step; everything pointwise around it is one kernel. Nothing
is allocated, but for one `[batch, hidden]` where h is projected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from encore.kernels.gpu import recurrent
from encore.kernels.gpu.launch import launch
from encore.kernels.gpu.tiles import tile_for
from encore.rnn.plain import pack, packed_numel
from encore.rnn.sequence import Chunk

__all__ = [
    "add_column_sums", "elman_backward", "elman_forward", "gru_backward", "gru_forward", "gru_rebuild",
    "lstm_backward", "lstm_forward", "lstm_rebuild", "pack", "packed_numel", "temporary_bytes",
]  # fmt: skip


def temporary_bytes(batch: int, hidden: int, dtype: torch.dtype) -> int:
    """A bound on what the functions below allocate: gradients on their way back through a projection."""
    return batch * hidden * dtype.itemsize


def add_column_sums(matrix: Tensor, sums: Tensor) -> None:
    """`sums += matrix.sum(0)`."""
    rows, width = matrix.shape
    tile = tile_for(width)
    grid = tile.grid(1, width)[1:]
    launch(recurrent.column_sums, grid, matrix, sums, rows, width, ROWS=tile.rows, UNITS=tile.units)


def lstm_forward(
    chunk: Chunk, inputs: Tensor, bias: Tensor, weight: Tensor | None, projection: Tensor | None, before: Tensor,
    after: Tensor, cell: Tensor, raw: Tensor | None, output: Tensor, gates: Tensor | None, cells: Tensor | None,
) -> None:  # fmt: skip
    hidden, width = cell.shape[1], output.shape[1]
    for row, active in zip(chunk.row, chunk.active, strict=True):
        step = slice(row, row + active)
        products = inputs[step]
        if weight is not None:
            products.addmm_(before[:active], weight.view(width, 4 * hidden))
        _over_rows(
            recurrent.lstm_cell, active, hidden, products, bias, cell, raw, output[step], after, _at(gates, step),
            _at(cells, step),
        )  # fmt: skip
        if raw is not None and projection is not None:
            torch.mm(raw[:active], projection.view(hidden, width), out=after[:active])
            output[step] = after[:active]
            if output.dtype != after.dtype:
                after[:active] = output[step]
        before, after = after, before


def lstm_rebuild(
    chunk: Chunk, bias: Tensor, enter: Tensor, known: int, initial: Tensor, gates: Tensor, cells: Tensor,
    raw: Tensor | None,
) -> None:  # fmt: skip
    hidden = cells.shape[1]
    for number, (row, active) in enumerate(zip(chunk.row, chunk.active, strict=True)):
        step = slice(row, row + active)
        left, found = _left(chunk, number, cells, enter, known)
        _over_rows(
            recurrent.lstm_cell_again, active, hidden, gates[step], bias, left, found, initial, cells[step],
            _at(raw, step),
        )  # fmt: skip


def lstm_backward(
    chunk: Chunk, weight: Tensor | None, projection: Tensor | None, grad_output: Tensor | None, gates: Tensor,
    cells: Tensor, enter: Tensor, known: int, initial: Tensor, grad_gates: Tensor, grad_state: Tensor,
    grad_cell: Tensor, grad_projected: Tensor | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    hidden, width = cells.shape[1], grad_state.shape[1]
    unprojected = None if projection is None else torch.empty_like(grad_cell)
    for number in reversed(range(len(chunk.times))):
        row, active = chunk.row[number], chunk.active[number]
        step = slice(row, row + active)
        grad_h, its_output, stride = grad_state, *_gradient(chunk, number, grad_output)
        if projection is not None and grad_projected is not None and unprojected is not None:
            _over_rows(recurrent.incoming, active, width, grad_state, its_output, stride, grad_projected[step])
            grad_h, its_output, stride = unprojected[:active], None, 0
            torch.mm(grad_projected[step], projection.view(width, hidden), out=grad_h)
        left, found = _left(chunk, number, cells, enter, known)
        _over_rows(
            recurrent.lstm_cell_backward, active, hidden, grad_h, its_output, stride, gates[step], cells[step], left,
            found, initial, grad_gates[step], grad_cell,
        )  # fmt: skip
        if weight is not None:
            torch.mm(grad_gates[step], weight.view(4 * hidden, width), out=grad_state[:active])


def gru_forward(
    chunk: Chunk, inputs: Tensor, bias: Tensor, weight: Tensor | None, before: Tensor, after: Tensor, output: Tensor,
    gates: Tensor | None,
) -> None:  # fmt: skip
    hidden = output.shape[1]
    for row, active in zip(chunk.row, chunk.active, strict=True):
        step = slice(row, row + active)
        products = inputs[step]
        if weight is not None:
            by_gate = weight.view(hidden, 3 * hidden)
            products[:, hidden : 3 * hidden].addmm_(before[:active], by_gate[:, : 2 * hidden])
            torch.mm(before[:active], by_gate[:, 2 * hidden :], out=products[:, 3 * hidden :])
        _over_rows(
            recurrent.gru_cell, active, hidden, products, bias, before, after, output[step], _at(gates, step)
        )  # fmt: skip
        before, after = after, before


def gru_rebuild(bias: Tensor, gates: Tensor) -> None:
    _over_rows(recurrent.gru_gates, gates.shape[0], gates.shape[1] // 4, gates, bias)


def gru_backward(
    chunk: Chunk, weight: Tensor | None, grad_output: Tensor | None, gates: Tensor, previous: Tensor,
    grad_gates: Tensor, grad_state: Tensor, dtype: torch.dtype,
) -> None:  # fmt: skip
    hidden = grad_state.shape[1]
    for number in reversed(range(len(chunk.times))):
        row, active = chunk.row[number], chunk.active[number]
        step = slice(row, row + active)
        its_output, stride = _gradient(chunk, number, grad_output)
        _over_rows(
            recurrent.gru_cell_backward, active, hidden, grad_state, its_output, stride, gates[step], previous[step],
            grad_gates[step],
        )  # fmt: skip
        if weight is not None:
            grad_state[:active].addmm_(grad_gates[step, hidden:], weight.view(3 * hidden, hidden))


def elman_forward(
    chunk: Chunk, relu: bool, inputs: Tensor, bias: Tensor, weight: Tensor | None, before: Tensor, after: Tensor,
    output: Tensor,
) -> None:  # fmt: skip
    hidden = output.shape[1]
    for row, active in zip(chunk.row, chunk.active, strict=True):
        step = slice(row, row + active)
        products = inputs[step]
        if weight is not None:
            products.addmm_(before[:active], weight.view(hidden, hidden))
        _over_rows(recurrent.elman_cell, active, hidden, products, bias, after, output[step], RELU=relu)
        before, after = after, before


def elman_backward(
    chunk: Chunk, relu: bool, weight: Tensor | None, grad_output: Tensor | None, output: Tensor, grad_gates: Tensor,
    grad_state: Tensor,
) -> None:  # fmt: skip
    hidden = grad_state.shape[1]
    for number in reversed(range(len(chunk.times))):
        row, active = chunk.row[number], chunk.active[number]
        step = slice(row, row + active)
        its_output, stride = _gradient(chunk, number, grad_output)
        _over_rows(
            recurrent.elman_cell_backward, active, hidden, grad_state, its_output, stride, output[step],
            grad_gates[step], RELU=relu,
        )  # fmt: skip
        if weight is not None:
            torch.mm(grad_gates[step], weight.view(hidden, hidden), out=grad_state[:active])


def _over_rows(kernel: Any, rows: int, width: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel over `rows` rows of a matrix of this width."""
    tile = tile_for(width)
    grid = tile.grid(rows, width)
    launch(kernel, grid, *arguments, rows, width, **constants, ROWS=tile.rows, UNITS=tile.units)


def _at(tensor: Tensor | None, step: slice) -> Tensor | None:
    return None if tensor is None else tensor[step]


def _left(chunk: Chunk, number: int, states: Tensor, enter: Tensor, known: int) -> tuple[Tensor, int]:
    """The states that the step before left, and of how many rows; rows beyond them have their initial state."""
    active = chunk.active[number]
    if number == 0:
        return enter, min(active, known)
    return states[chunk.row[number - 1] :], min(active, chunk.active[number - 1])


def _gradient(chunk: Chunk, number: int, grad_output: Tensor | None) -> tuple[Tensor | None, int]:
    """The gradient of a step's output, and how far apart its rows lie."""
    if grad_output is None:
        return None, 0
    if grad_output.dim() == 3:
        return grad_output[chunk.times[number]], grad_output.stride(1)
    row = chunk.first + chunk.row[number]
    return grad_output[row : row + chunk.active[number]], grad_output.stride(0)
