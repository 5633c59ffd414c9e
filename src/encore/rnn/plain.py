"""The steps of recurrent layers in PyTorch's own operators: the same functions as `native.py`, for where there is no
C++ compiler, and for devices other than the CPU.

The same algorithm on the same buffers, so the results agree to rounding. Steps allocate a few `[batch, hidden]`
temporaries, which `temporary_bytes` bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encore.rnn.sequence import Chunk

TEMPORARIES = 16
"""No step has more temporaries of `[batch, hidden]` alive at once."""


def temporary_bytes(batch: int, hidden: int, dtype: torch.dtype) -> int:
    """A bound on what the functions below allocate."""
    return TEMPORARIES * batch * hidden * dtype.itemsize


def packed_numel(gates: int, units: int, depth: int, dtype: torch.dtype) -> int:
    return gates * units * depth


def pack(weight: Tensor, gates: int, *, transposed: bool, out: Tensor) -> None:
    """The weight as products read it, contiguous: `[depth, gates * units]`."""
    source = weight if transposed else weight.t()
    out.view(source.shape).copy_(source)


def add_column_sums(matrix: Tensor, sums: Tensor) -> None:
    sums.add_(matrix.sum(0))


def lstm_forward(
    chunk: Chunk, inputs: Tensor, bias: Tensor, weight: Tensor | None, projection: Tensor | None, before: Tensor,
    after: Tensor, cell: Tensor, raw: Tensor | None, output: Tensor, gates: Tensor | None, cells: Tensor | None,
) -> None:  # fmt: skip
    hidden, width = cell.shape[1], output.shape[1]
    for row, active in zip(chunk.row, chunk.active, strict=True):
        step = slice(row, row + active)
        pre = inputs[step]
        if weight is not None:
            pre.addmm_(before[:active], weight.view(width, 4 * hidden))
        pre.add_(bias)
        pre[:, : 2 * hidden].sigmoid_()
        pre[:, 2 * hidden : 3 * hidden].tanh_()
        pre[:, 3 * hidden :].sigmoid_()
        i, f, g, o = pre.chunk(4, 1)
        c = cell[:active].mul_(f).addcmul_(i, g)
        h = c.tanh().mul_(o)
        if gates is not None and gates.data_ptr() != inputs.data_ptr():
            gates[step] = pre
        if cells is not None:
            cells[step] = c
        if raw is not None and projection is not None:
            h = h @ projection.view(hidden, width)
        output[step] = h
        after[:active] = output[step]
        before, after = after, before


def lstm_rebuild(
    chunk: Chunk, bias: Tensor, enter: Tensor, known: int, initial: Tensor, gates: Tensor, cells: Tensor,
    raw: Tensor | None,
) -> None:  # fmt: skip
    hidden = cells.shape[1]
    gates.add_(bias)
    gates[:, : 2 * hidden].sigmoid_()
    gates[:, 2 * hidden : 3 * hidden].tanh_()
    gates[:, 3 * hidden :].sigmoid_()
    for number, (row, active) in enumerate(zip(chunk.row, chunk.active, strict=True)):
        i, f, g, o = gates[row : row + active].chunk(4, 1)
        c = cells[row : row + active]
        torch.mul(f, _previous(chunk, number, cells, enter, known, initial), out=c)
        c.addcmul_(i, g)
        if raw is not None:
            torch.mul(c.tanh(), o, out=raw[row : row + active])


def lstm_backward(
    chunk: Chunk, weight: Tensor | None, projection: Tensor | None, grad_output: Tensor | None, gates: Tensor,
    cells: Tensor, enter: Tensor, known: int, initial: Tensor, grad_gates: Tensor, grad_state: Tensor,
    grad_cell: Tensor, grad_projected: Tensor | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    hidden, width = cells.shape[1], grad_state.shape[1]
    for number in reversed(range(len(chunk.times))):
        row, active = chunk.row[number], chunk.active[number]
        step = slice(row, row + active)
        grad_h = _incoming(chunk, number, grad_output, grad_state)
        if projection is not None and grad_projected is not None:
            grad_projected[step] = grad_h
            grad_h = grad_h @ projection.view(width, hidden)
        i, f, g, o = (gate.to(cells.dtype) for gate in gates[step].chunk(4, 1))
        tanh_c = cells[step].tanh()
        before = _previous(chunk, number, cells, enter, known, initial)
        grad_c = grad_cell[:active].add_(grad_h * o * (1 - tanh_c * tanh_c))
        parts = grad_gates[step].chunk(4, 1)
        grads = grad_c * g * i * (1 - i), grad_c * before * f * (1 - f)
        grad_g = grad_c * i * (1 - g * g)
        grad_c.mul_(f)
        parts[3].copy_(grad_h.mul_(tanh_c).mul_(o * (1 - o)))  # the last reader of o, which may lie in the same memory
        parts[0].copy_(grads[0])
        parts[1].copy_(grads[1])
        parts[2].copy_(grad_g)
        if weight is not None:
            torch.mm(grad_gates[step], weight.view(4 * hidden, width), out=grad_state[:active])


def gru_forward(
    chunk: Chunk, inputs: Tensor, bias: Tensor, weight: Tensor | None, before: Tensor, after: Tensor, output: Tensor,
    gates: Tensor | None,
) -> None:  # fmt: skip
    hidden = output.shape[1]
    for row, active in zip(chunk.row, chunk.active, strict=True):
        step = slice(row, row + active)
        pre = inputs[step]
        if weight is not None:
            recurrent = weight.view(hidden, 3 * hidden)
            pre[:, hidden : 3 * hidden].addmm_(before[:active], recurrent[:, : 2 * hidden])
            torch.mm(before[:active], recurrent[:, 2 * hidden :], out=pre[:, 3 * hidden :])
        gru_rebuild(bias, pre)
        n, _, z, _ = pre.chunk(4, 1)
        if gates is not None and gates.data_ptr() != inputs.data_ptr():
            gates[step] = pre
        output[step] = n + z * (before[:active] - n)
        after[:active] = output[step]
        before, after = after, before


def gru_rebuild(bias: Tensor, gates: Tensor) -> None:
    hidden = gates.shape[1] // 4
    gates.add_(bias)
    gates[:, hidden : 3 * hidden].sigmoid_()
    n, r, _, recurrent = gates.chunk(4, 1)
    n.addcmul_(r, recurrent).tanh_()


def gru_backward(
    chunk: Chunk, weight: Tensor | None, grad_output: Tensor | None, gates: Tensor, previous: Tensor,
    grad_gates: Tensor, grad_state: Tensor, dtype: torch.dtype,
) -> None:  # fmt: skip
    hidden = grad_state.shape[1]
    for number in reversed(range(len(chunk.times))):
        row, active = chunk.row[number], chunk.active[number]
        step = slice(row, row + active)
        grad = _incoming(chunk, number, grad_output, grad_state)
        n, r, z, part = (gate.to(grad.dtype) for gate in gates[step].chunk(4, 1))
        grad_state[:active] = grad * z
        grad_z = grad * (previous[step] - n) * z * (1 - z)
        grad_n = grad.mul_(1 - z).mul_(1 - n * n)
        grad_r = grad_n * part * r * (1 - r)
        parts = grad_gates[step].chunk(4, 1)
        parts[3].copy_(grad_n * r)  # the last reader of the gates, which may lie in the same memory
        parts[0].copy_(grad_n)
        parts[1].copy_(grad_r)
        parts[2].copy_(grad_z)
        if weight is not None:
            grad_state[:active].addmm_(grad_gates[step, hidden:], weight.view(3 * hidden, hidden))


def elman_forward(
    chunk: Chunk, relu: bool, inputs: Tensor, bias: Tensor, weight: Tensor | None, before: Tensor, after: Tensor,
    output: Tensor,
) -> None:  # fmt: skip
    hidden = output.shape[1]
    for row, active in zip(chunk.row, chunk.active, strict=True):
        step = slice(row, row + active)
        pre = inputs[step]
        if weight is not None:
            pre.addmm_(before[:active], weight.view(hidden, hidden))
        pre.add_(bias)
        output[step] = pre.relu_() if relu else pre.tanh_()
        after[:active] = output[step]
        before, after = after, before


def elman_backward(
    chunk: Chunk, relu: bool, weight: Tensor | None, grad_output: Tensor | None, output: Tensor, grad_gates: Tensor,
    grad_state: Tensor,
) -> None:  # fmt: skip
    hidden = grad_state.shape[1]
    for number in reversed(range(len(chunk.times))):
        row, active = chunk.row[number], chunk.active[number]
        step = slice(row, row + active)
        grad = _incoming(chunk, number, grad_output, grad_state)
        h = output[step].to(grad.dtype)
        # A gradient passes unless h <= 0: through NaN it does, as in PyTorch.
        grad_gates[step] = grad.masked_fill_(h <= 0, 0) if relu else grad.mul_(1 - h * h)
        if weight is not None:
            torch.mm(grad_gates[step], weight.view(hidden, hidden), out=grad_state[:active])


def _previous(chunk: Chunk, number: int, states: Tensor, enter: Tensor, known: int, initial: Tensor) -> Tensor:
    """The states that a step finds: from the step before it, and from the initial state for rows it did not have."""
    active = chunk.active[number]
    if number:
        row, found = chunk.row[number - 1], min(active, chunk.active[number - 1])
        left = states[row : row + found]
    else:
        found = min(active, known)
        left = enter[:found]
    return left if found == active else torch.cat((left, initial[found:active]))


def _incoming(chunk: Chunk, number: int, grad_output: Tensor | None, grad_state: Tensor) -> Tensor:
    """What reaches h at a step: from later steps and from the output."""
    active = chunk.active[number]
    if grad_output is None:
        return grad_state[:active].clone()
    if grad_output.dim() == 3:
        return grad_state[:active] + grad_output[chunk.times[number]]
    row = chunk.first + chunk.row[number]
    return grad_state[:active] + grad_output[row : row + active]
