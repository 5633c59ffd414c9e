"""The steps of recurrent layers on GPUs: all of a chunk in one launch, or each of them in two.

`kernels/gpu/recurrent_loops.py` has the loops, for the sizes in `gpu_loops.py`. Else the product with the recurrent
weight is PyTorch's, one a step, and everything pointwise around it is one kernel (`kernels/gpu/recurrent.py`). Nothing
is allocated, except one `[batch, hidden]` for a projected h, and the counters at which programs of a loop meet.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from encore.kernels.gpu import recurrent, recurrent_loops
from encore.kernels.gpu.launcher import launch
from encore.kernels.gpu.tiles import tile_for
from encore.rnn import gpu_loops
from encore.rnn.gpu_loops import LoopGrid
from encore.rnn.steps import (
    BackwardSteps,
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


def temporary_bytes(batch: int, hidden: int, dtype: torch.dtype) -> int:
    return batch * hidden * dtype.itemsize


def add_column_sums(matrix: Tensor, sums: Tensor) -> None:
    rows, width = matrix.shape
    tile = tile_for(width)
    grid = tile.grid(1, width)[1:]
    launch(recurrent.column_sums, grid, matrix, sums, rows, width, ROWS=tile.rows, UNITS=tile.units)


def forward(cell: str, steps: ForwardSteps) -> None:
    loop = _loop(cell, steps)
    if loop is not None:
        _FORWARD_LOOPS[cell](loop, steps)
        return
    run_forward(cell, steps, {"lstm": _lstm, "gru": _gru, "elman": _elman}[cell])


def backward(cell: str, steps: BackwardSteps) -> None:
    loop = _loop(cell, steps)
    if loop is not None:
        _BACKWARD_LOOPS[cell](loop, steps)
        return
    if cell == "lstm":
        assert steps.grad_cell is not None
        unprojected = None if steps.projection is None else torch.empty_like(steps.grad_cell)
        run_backward(cell, steps, functools.partial(_lstm_backward, unprojected))
    else:
        run_backward(cell, steps, {"gru": _gru_backward, "elman": _elman_backward}[cell])


def rebuild(cell: str, steps: RebuiltGates) -> None:
    if cell == "gru":
        _over_rows(recurrent.gru_gates, steps.rows, steps.hidden, steps.gates, steps.bias)
        return
    entering, cells = steps.entering, steps.cells
    assert entering is not None
    assert cells is not None
    first = gpu_loops.entering_states(steps.chunk, entering.state, entering.known, entering.initial)
    if len(steps.chunk.times) > 1 and steps.chunk.even and first is not None and steps.raw is None:
        chunk, grid = steps.chunk, (-(-steps.chunk.active[0] // gpu_loops.ROWS), -(-steps.hidden // gpu_loops.UNITS))
        launch(
            recurrent_loops.lstm_loop_again, grid, steps.gates, steps.bias, first, steps.resets, cells,
            len(chunk.times), chunk.active[0], steps.hidden, REVERSE=chunk.reverse, ROWS=gpu_loops.ROWS,
            UNITS=gpu_loops.UNITS,
        )  # fmt: skip
        return
    for number in range(len(steps.chunk.times)):
        step = step_of(steps.chunk, number)
        left, found = states_before(steps.chunk, number, cells, entering)
        _over_rows(
            recurrent.lstm_cell_again, step.active, steps.hidden, steps.gates[step.rows], steps.bias, left, found,
            entering.initial, _at(steps.resets, step), cells[step.rows], _at(steps.raw, step),
        )  # fmt: skip


# ---- loops ---------------------------------------------------------------------------------------------------------


def _loop(cell: str, steps: ForwardSteps | BackwardSteps) -> LoopGrid | None:
    """The programs that run a chunk's loop; None if it is run step by step."""
    chunk, weight = steps.chunk, steps.weight
    if weight is None or steps.projection is not None or not chunk.even or len(chunk.times) == 1:
        return None
    entering = steps.entering if isinstance(steps, BackwardSteps) else None
    if entering is not None and 0 < entering.known < chunk.active[0]:
        return None
    return gpu_loops.loop_grid(cell, chunk.active[0], steps.hidden, weight.dtype, weight.device)


def _launch_loop(
    kernel: Any, loop: LoopGrid, steps: ForwardSteps | BackwardSteps, turns: int, *tensors: Any, **constants: Any
) -> None:
    """Run the turns of a loop: in one launch, unless there are very many."""
    chunk, weight = steps.chunk, steps.weight
    assert weight is not None
    for begin in range(0, turns, gpu_loops.MOST_STEPS):
        end = min(turns, begin + gpu_loops.MOST_STEPS)
        meeting = None
        if loop.programs > 1 and end - begin > 1:
            meeting = torch.zeros(loop.blocks, dtype=torch.int32, device=weight.device)
            constants["launch_cooperative_grid"] = True
        launch(
            kernel, (loop.blocks, loop.programs), *tensors, meeting, begin, end, len(chunk.times), chunk.active[0],
            steps.hidden, **constants, REVERSE=chunk.reverse, PROGRAMS=loop.programs, ROWS=gpu_loops.ROWS,
            UNITS=gpu_loops.UNITS, DEPTH=gpu_loops.DEPTH, PRECISION=gpu_loops.precision(weight.dtype),
            num_warps=gpu_loops.WARPS, num_stages=loop.stages,
        )  # fmt: skip


def _lstm_loop(loop: LoopGrid, steps: ForwardSteps) -> None:
    _launch_loop(
        recurrent_loops.lstm_loop, loop, steps, len(steps.chunk.times), steps.inputs, steps.bias, steps.weight,
        steps.before, steps.after, steps.cell, steps.output, steps.gates, steps.cells, steps.resets,
    )  # fmt: skip


def _gru_loop(loop: LoopGrid, steps: ForwardSteps) -> None:
    _launch_loop(
        recurrent_loops.gru_loop, loop, steps, len(steps.chunk.times), steps.inputs, steps.bias, steps.weight,
        steps.before, steps.after, steps.output, steps.gates, steps.resets,
    )  # fmt: skip


def _elman_loop(loop: LoopGrid, steps: ForwardSteps) -> None:
    _launch_loop(
        recurrent_loops.elman_loop, loop, steps, len(steps.chunk.times), steps.inputs, steps.bias, steps.weight,
        steps.before, steps.after, steps.output, steps.resets, RELU=steps.relu,
    )  # fmt: skip


def _lstm_loop_backward(loop: LoopGrid, steps: BackwardSteps) -> None:
    entering = steps.entering
    assert entering is not None
    first = gpu_loops.entering_states(steps.chunk, entering.state, entering.known, entering.initial)
    _launch_loop(
        recurrent_loops.lstm_loop_backward, loop, steps, len(steps.chunk.times) + 1, steps.weight, steps.grad_state,
        *gpu_loops.gradient_rows(steps.chunk, steps.grad_output), steps.gates, steps.cells, first, steps.resets,
        steps.grad_gates, steps.grad_cell,
    )  # fmt: skip


def _gru_loop_backward(loop: LoopGrid, steps: BackwardSteps) -> None:
    _launch_loop(
        recurrent_loops.gru_loop_backward, loop, steps, len(steps.chunk.times) + 1, steps.weight, steps.grad_state,
        *gpu_loops.gradient_rows(steps.chunk, steps.grad_output), steps.gates, steps.previous, steps.resets,
        steps.grad_gates,
    )  # fmt: skip


def _elman_loop_backward(loop: LoopGrid, steps: BackwardSteps) -> None:
    _launch_loop(
        recurrent_loops.elman_loop_backward, loop, steps, len(steps.chunk.times) + 1, steps.weight, steps.grad_state,
        *gpu_loops.gradient_rows(steps.chunk, steps.grad_output), steps.output, steps.resets, steps.grad_gates,
        RELU=steps.relu,
    )  # fmt: skip


_FORWARD_LOOPS = {"lstm": _lstm_loop, "gru": _gru_loop, "elman": _elman_loop}
_BACKWARD_LOOPS = {"lstm": _lstm_loop_backward, "gru": _gru_loop_backward, "elman": _elman_loop_backward}


# ---- step by step --------------------------------------------------------------------------------------------------


def _lstm(steps: ForwardSteps, step: Step, products: Tensor, before: Tensor, after: Tensor) -> None:
    output, into = steps.output[step.rows], after[: step.active]
    _over_rows(
        recurrent.lstm_cell, step.active, steps.hidden, products, steps.bias, steps.cell, steps.raw, output, after,
        _at(steps.gates, step), _at(steps.cells, step),
    )  # fmt: skip
    if steps.raw is not None and steps.projection is not None:
        torch.mm(steps.raw[: step.active], steps.projection.view(steps.hidden, steps.width), out=into)
        output.copy_(into)
        if output.dtype != into.dtype:
            into.copy_(output)


def _lstm_backward(unprojected: Tensor | None, steps: BackwardSteps, step: Step) -> None:
    entering, cells, grad_cell = steps.entering, steps.cells, steps.grad_cell
    assert entering is not None
    assert cells is not None
    assert grad_cell is not None
    incoming = steps.grad_state, *_gradient(steps, step)
    if steps.projection is not None and steps.grad_projected is not None and unprojected is not None:
        projected, grad_h = steps.grad_projected[step.rows], unprojected[: step.active]
        _over_rows(recurrent.incoming, step.active, steps.width, *incoming, projected)
        torch.mm(projected, steps.projection.view(steps.width, steps.hidden), out=grad_h)
        incoming = grad_h, None, 0
    left, found = states_before(steps.chunk, step.number, cells, entering)
    _over_rows(
        recurrent.lstm_cell_backward, step.active, steps.hidden, *incoming, _at(steps.gates, step), cells[step.rows],
        left, found, entering.initial, _at(steps.resets, step), steps.grad_gates[step.rows], grad_cell,
    )  # fmt: skip


def _gru(steps: ForwardSteps, step: Step, products: Tensor, before: Tensor, after: Tensor) -> None:
    _over_rows(
        recurrent.gru_cell, step.active, steps.hidden, products, steps.bias, before, after, steps.output[step.rows],
        _at(steps.gates, step),
    )  # fmt: skip


def _gru_backward(steps: BackwardSteps, step: Step) -> None:
    _over_rows(
        recurrent.gru_cell_backward, step.active, steps.hidden, steps.grad_state, *_gradient(steps, step),
        _at(steps.gates, step), _at(steps.previous, step), steps.grad_gates[step.rows],
    )  # fmt: skip


def _elman(steps: ForwardSteps, step: Step, products: Tensor, before: Tensor, after: Tensor) -> None:
    _over_rows(
        recurrent.elman_cell, step.active, steps.hidden, products, steps.bias, after, steps.output[step.rows],
        RELU=steps.relu,
    )  # fmt: skip


def _elman_backward(steps: BackwardSteps, step: Step) -> None:
    _over_rows(
        recurrent.elman_cell_backward, step.active, steps.hidden, steps.grad_state, *_gradient(steps, step),
        _at(steps.output, step), steps.grad_gates[step.rows], RELU=steps.relu,
    )  # fmt: skip


def _over_rows(kernel: Any, rows: int, width: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel over `rows` rows of a matrix of this width."""
    tile = tile_for(width)
    grid = tile.grid(rows, width)
    launch(kernel, grid, *arguments, rows, width, **constants, ROWS=tile.rows, UNITS=tile.units)


def _at(tensor: Tensor | None, step: Step) -> Tensor | None:
    return None if tensor is None else tensor[step.rows]


def _gradient(steps: BackwardSteps, step: Step) -> tuple[Tensor | None, int]:
    """The gradient of a step's output, and the stride of its rows."""
    grad = output_gradient(steps, step)
    return grad, 0 if grad is None else grad.stride(0)
