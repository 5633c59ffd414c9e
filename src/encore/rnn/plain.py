"""The steps of recurrent layers in PyTorch's own operators: without a C++ compiler, and on other devices than the CPU.

The same algorithm on the same buffers as in C++, so the results agree to rounding. Steps allocate a few `[batch,
hidden]` temporaries, which `temporary_bytes` bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encore.rnn.sequence import Chunk
from encore.rnn.steps import (
    BackwardSteps,
    Entering,
    ForwardSteps,
    RebuiltGates,
    Step,
    output_gradient,
    pack,
    packed_numel,
    run_backward,
    run_forward,
    states_before,
    step_of,
)

__all__ = ["add_column_sums", "backward", "forward", "pack", "packed_numel", "rebuild", "temporary_bytes"]

TEMPORARIES = 16
"""No step has more temporaries of `[batch, hidden]` alive at once."""


def temporary_bytes(batch: int, hidden: int, dtype: torch.dtype) -> int:
    return TEMPORARIES * batch * hidden * dtype.itemsize


def add_column_sums(matrix: Tensor, sums: Tensor) -> None:
    sums.add_(matrix.sum(0))


def forward(cell: str, steps: ForwardSteps) -> None:
    run_forward(cell, steps, {"lstm": _lstm, "gru": _gru, "elman": _elman}[cell])


def backward(cell: str, steps: BackwardSteps) -> None:
    run_backward(cell, steps, {"lstm": _lstm_backward, "gru": _gru_backward, "elman": _elman_backward}[cell])


def rebuild(cell: str, steps: RebuiltGates) -> None:
    if cell == "gru":
        _gru_gates(steps.gates, steps.bias)
        return
    assert steps.entering is not None
    assert steps.cells is not None
    for number in range(len(steps.chunk.times)):
        rows = step_of(steps.chunk, number).rows
        i, f, g, o = _lstm_gates(steps.gates[rows], steps.bias)
        c = steps.cells[rows]
        torch.mul(f, _previous(steps.chunk, number, steps.cells, steps.entering, steps.resets), out=c)
        c.addcmul_(i, g)
        if steps.raw is not None:
            torch.mul(c.tanh(), o, out=steps.raw[rows])


# ---- LSTM: gates lie as i, f, g, o ---------------------------------------------------------------------------------


def _lstm_gates(products: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Gates from products with inputs and states, in place."""
    hidden = products.shape[1] // 4
    products.add_(bias)
    products[:, : 2 * hidden].sigmoid_()
    products[:, 2 * hidden : 3 * hidden].tanh_()
    products[:, 3 * hidden :].sigmoid_()
    return products.chunk(4, 1)


def _lstm(steps: ForwardSteps, step: Step, products: Tensor, before: Tensor, after: Tensor) -> None:
    assert steps.cell is not None
    i, f, g, o = _lstm_gates(products, steps.bias)
    c = steps.cell[: step.active].mul_(f).addcmul_(i, g)
    h = c.tanh().mul_(o)
    if steps.cells is not None:
        steps.cells[step.rows] = c
    if steps.projection is not None:
        h = h @ steps.projection.view(steps.hidden, steps.width)
    _store(steps, step, products, h, after)


def _lstm_backward(steps: BackwardSteps, step: Step) -> None:
    assert steps.gates is not None
    assert steps.cells is not None
    assert steps.entering is not None
    assert steps.grad_cell is not None
    grad_h = _incoming(steps, step)
    if steps.projection is not None and steps.grad_projected is not None:
        steps.grad_projected[step.rows] = grad_h
        grad_h = grad_h @ steps.projection.view(steps.width, steps.hidden)
    i, f, g, o = (gate.to(steps.cells.dtype) for gate in steps.gates[step.rows].chunk(4, 1))
    tanh_c = steps.cells[step.rows].tanh()
    before = _previous(steps.chunk, step.number, steps.cells, steps.entering, steps.resets)
    grad_c = steps.grad_cell[: step.active].add_(grad_h * o * (1 - tanh_c * tanh_c))
    parts = steps.grad_gates[step.rows].chunk(4, 1)
    grads = grad_c * g * i * (1 - i), grad_c * before * f * (1 - f)
    grad_g = grad_c * i * (1 - g * g)
    grad_c.mul_(f)
    parts[3].copy_(grad_h.mul_(tanh_c).mul_(o * (1 - o)))  # the last reader of o, which may lie in the same memory
    parts[0].copy_(grads[0])
    parts[1].copy_(grads[1])
    parts[2].copy_(grad_g)


def _previous(chunk: Chunk, number: int, states: Tensor, entering: Entering, resets: Tensor | None) -> Tensor:
    """The states that a step finds, those that no step has computed included."""
    left, found = states_before(chunk, number, states, entering)
    active = chunk.active[number]
    states = left[:found] if found == active else torch.cat((left[:found], entering.initial[found:active]))
    return states if resets is None else states.masked_fill(resets[step_of(chunk, number).rows].unsqueeze(1), 0)


# ---- GRU: gates lie as n, r, z and the recurrent part of n ---------------------------------------------------------


def _gru_gates(products: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Gates from products with inputs and states, in place."""
    hidden = products.shape[1] // 4
    products.add_(bias)
    products[:, hidden : 3 * hidden].sigmoid_()
    n, r, z, recurrent = products.chunk(4, 1)
    n.addcmul_(r, recurrent).tanh_()
    return n, r, z, recurrent


def _gru(steps: ForwardSteps, step: Step, products: Tensor, before: Tensor, after: Tensor) -> None:
    n, _, z, _ = _gru_gates(products, steps.bias)
    _store(steps, step, products, n + z * (before[: step.active] - n), after)


def _gru_backward(steps: BackwardSteps, step: Step) -> None:
    assert steps.gates is not None
    assert steps.previous is not None
    grad = _incoming(steps, step)
    n, r, z, part = (gate.to(grad.dtype) for gate in steps.gates[step.rows].chunk(4, 1))
    steps.grad_state[: step.active] = grad * z
    grad_z = grad * (steps.previous[step.rows] - n) * z * (1 - z)
    grad_n = grad.mul_(1 - z).mul_(1 - n * n)
    grad_r = grad_n * part * r * (1 - r)
    parts = steps.grad_gates[step.rows].chunk(4, 1)
    parts[3].copy_(grad_n * r)  # the last reader of the gates, which may lie in the same memory
    parts[0].copy_(grad_n)
    parts[1].copy_(grad_r)
    parts[2].copy_(grad_z)


# ---- the plain layer -----------------------------------------------------------------------------------------------


def _elman(steps: ForwardSteps, step: Step, products: Tensor, before: Tensor, after: Tensor) -> None:
    products.add_(steps.bias)
    _store(steps, step, products, products.relu_() if steps.relu else products.tanh_(), after)


def _elman_backward(steps: BackwardSteps, step: Step) -> None:
    assert steps.output is not None
    grad = _incoming(steps, step)
    h = steps.output[step.rows].to(grad.dtype)
    # A gradient passes unless h <= 0: through NaN it does, as in PyTorch.
    steps.grad_gates[step.rows] = grad.masked_fill_(h <= 0, 0) if steps.relu else grad.mul_(1 - h * h)


# ---- all cells -----------------------------------------------------------------------------------------------------


def _store(steps: ForwardSteps, step: Step, gates: Tensor, h: Tensor, after: Tensor) -> None:
    """Store h, and the gates if they are kept and lie elsewhere."""
    if steps.gates is not None and steps.gates.data_ptr() != steps.inputs.data_ptr():
        steps.gates[step.rows] = gates
    steps.output[step.rows] = h
    after[: step.active] = steps.output[step.rows]


def _incoming(steps: BackwardSteps, step: Step) -> Tensor:
    """What reaches h at a step: from later steps and from the output."""
    grad_state, grad_output = steps.grad_state[: step.active], output_gradient(steps, step)
    return grad_state.clone() if grad_output is None else grad_state + grad_output
