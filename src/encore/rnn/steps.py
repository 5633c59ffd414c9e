"""The steps of a chunk: what they read and write, what runs them (`StepKernels`), and the loop over them.

`native.py` runs all steps of a chunk in one C++ function. `plain.py` (PyTorch's operators) and `gpu.py` (Triton) have
one function a cell for what is pointwise in a step; `run_forward` and `run_backward` go through the steps and multiply
with the recurrent weight. Tensors of rows begin at the chunk's first row; those of a batch, a row for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from encore.rnn.sequence import Chunk


@dataclass(slots=True)
class ForwardSteps:
    """Forward through a chunk."""

    chunk: Chunk
    inputs: Tensor
    """Rows of products with the inputs, without bias."""
    bias: Tensor
    weight: Tensor | None
    """The packed recurrent weight. None for a single step whose recurrent product was added to `inputs`."""
    before: Tensor
    after: Tensor
    """h of the batch, read from one and written to the other; each step exchanges them."""
    output: Tensor
    """Rows of h."""
    gates: Tensor | None = None
    """Rows of gates, if they are kept; may be `inputs`."""
    relu: bool = False
    cell: Tensor | None = None
    """c of the batch, in place."""
    cells: Tensor | None = None
    """Rows of c, if they are kept."""
    projection: Tensor | None = None
    raw: Tensor | None = None
    """h of the batch before its projection."""
    resets: Tensor | None = None
    """Rows of booleans: whether a row begins a sequence of its own and finds states of zero."""

    @property
    def hidden(self) -> int:
        return (self.output if self.cell is None else self.cell).shape[1]

    @property
    def width(self) -> int:
        return self.output.shape[1]


@dataclass(slots=True)
class Entering:
    """The c that the first step of a chunk finds: that of `known` rows, and the initial one of the others."""

    state: Tensor
    known: int
    initial: Tensor


@dataclass(slots=True)
class RebuiltGates:
    """Rows of gates, recomputed in place from products with inputs and states; for an LSTM also rows of c, and of h
    before its projection."""

    chunk: Chunk
    bias: Tensor
    gates: Tensor
    entering: Entering | None = None
    cells: Tensor | None = None
    raw: Tensor | None = None
    resets: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.gates.shape[0]

    @property
    def hidden(self) -> int:
        return self.gates.shape[1] // 4


@dataclass(slots=True)
class BackwardSteps:
    """Backward through a chunk."""

    chunk: Chunk
    dtype: torch.dtype
    """Of the sequences."""
    weight: Tensor | None
    """The packed recurrent weight. None for a single step whose recurrent product is left to the caller."""
    grad_output: Tensor | None
    """Of the whole sequence, `[T, B, width]` or `[rows, width]`."""
    grad_gates: Tensor
    """Rows of gradients of gates; may be `gates`."""
    grad_state: Tensor
    """The gradient of the batch's h, in place."""
    gates: Tensor | None = None
    output: Tensor | None = None
    """Rows of h."""
    previous: Tensor | None = None
    """Rows of the h that each step finds."""
    relu: bool = False
    entering: Entering | None = None
    cells: Tensor | None = None
    grad_cell: Tensor | None = None
    """The gradient of the batch's c, in place."""
    projection: Tensor | None = None
    grad_projected: Tensor | None = None
    """Rows of gradients of the projected h."""
    resets: Tensor | None = None

    @property
    def hidden(self) -> int:
        return (self.grad_state if self.grad_cell is None else self.grad_cell).shape[1]

    @property
    def width(self) -> int:
        return self.grad_state.shape[1]


class StepKernels(Protocol):
    """What runs the steps of every kind of cell ("lstm", "gru" or "elman"); the modules `native`, `plain` and `gpu`."""

    def temporary_bytes(self, batch: int, hidden: int, dtype: torch.dtype) -> int:
        """A bound on what the functions below allocate."""

    def packed_numel(self, gates: int, units: int, depth: int, dtype: torch.dtype) -> int:
        """The size of a packed weight."""

    def pack(self, weight: Tensor, gates: int, *, transposed: bool, out: Tensor) -> None:
        """Pack `[gates * units, depth]` for `h W^T`, or `[depth, units]` for products with W (`transposed`)."""

    def add_column_sums(self, matrix: Tensor, sums: Tensor) -> None:
        """`sums += matrix.sum(0)`."""

    def forward(self, cell: str, steps: ForwardSteps) -> None: ...
    def rebuild(self, cell: str, steps: RebuiltGates) -> None: ...
    def backward(self, cell: str, steps: BackwardSteps) -> None: ...


@dataclass(slots=True)
class Step:
    """One step of a chunk."""

    number: int
    rows: slice
    """From the chunk's first row on."""
    active: int


def step_of(chunk: Chunk, number: int) -> Step:
    row, active = chunk.row[number], chunk.active[number]
    return Step(number, slice(row, row + active), active)


def run_forward(
    name: str, steps: ForwardSteps, cell: Callable[[ForwardSteps, Step, Tensor, Tensor, Tensor], None]
) -> None:
    """Step after step, a product with the weight and `cell(steps, step, products, before, after)`."""
    before, after = steps.before, steps.after
    for number in range(len(steps.chunk.times)):
        step = step_of(steps.chunk, number)
        products, states = steps.inputs[step.rows], before[: step.active]
        if steps.weight is not None:  # else the caller has done this before it multiplied
            clear_reset(states, steps.resets, step.rows)
        if steps.cell is not None:
            clear_reset(steps.cell[: step.active], steps.resets, step.rows)
        if steps.weight is not None and name == "gru":  # added for r and z, separate for n
            hidden = steps.hidden
            by_gate = steps.weight.view(hidden, 3 * hidden)
            products[:, hidden : 3 * hidden].addmm_(states, by_gate[:, : 2 * hidden])
            torch.mm(states, by_gate[:, 2 * hidden :], out=products[:, 3 * hidden :])
        elif steps.weight is not None:
            products.addmm_(states, steps.weight.view(steps.width, products.shape[1]))
        cell(steps, step, products, before, after)
        before, after = after, before


def run_backward(name: str, steps: BackwardSteps, cell: Callable[[BackwardSteps, Step], None]) -> None:
    """From the last step to the first, `cell(steps, step)` and a product of its gradients with the weight."""
    for number in reversed(range(len(steps.chunk.times))):
        step = step_of(steps.chunk, number)
        cell(steps, step)
        if steps.grad_cell is not None:
            clear_reset(steps.grad_cell[: step.active], steps.resets, step.rows)
        if steps.weight is None:
            continue
        grad_state, grad_gates = steps.grad_state[: step.active], steps.grad_gates[step.rows]
        if name == "gru":  # the cell has written what bypasses the gates
            hidden = steps.hidden
            grad_state.addmm_(grad_gates[:, hidden:], steps.weight.view(3 * hidden, hidden))
        else:
            torch.mm(grad_gates, steps.weight.view(grad_gates.shape[1], steps.width), out=grad_state)
        clear_reset(grad_state, steps.resets, step.rows)


def clear_reset(states: Tensor, resets: Tensor | None, rows: slice) -> None:
    """Zero those rows of states, or of their gradients, where sequences begin."""
    if resets is not None:
        states.masked_fill_(resets[rows].unsqueeze(1), 0)


def states_before(chunk: Chunk, number: int, states: Tensor, entering: Entering) -> tuple[Tensor, int]:
    """The states that the step before left, and of how many rows; rows beyond them have their initial state."""
    active = chunk.active[number]
    if number == 0:
        return entering.state, min(active, entering.known)
    return states[chunk.row[number - 1] :], min(active, chunk.active[number - 1])


def output_gradient(steps: BackwardSteps, step: Step) -> Tensor | None:
    """The gradient of a step's output."""
    grad, chunk = steps.grad_output, steps.chunk
    if grad is None or grad.dim() == 3:
        return None if grad is None else grad[chunk.times[step.number]]
    row = chunk.first + step.rows.start
    return grad[row : row + step.active]


def pack(weight: Tensor, gates: int, *, transposed: bool, out: Tensor) -> None:
    """The weight as the products above read it, contiguous: `[depth, gates * units]`."""
    source = weight if transposed else weight.t()
    out.view(source.shape).copy_(source)


def packed_numel(gates: int, units: int, depth: int, dtype: torch.dtype) -> int:
    return gates * units * depth
