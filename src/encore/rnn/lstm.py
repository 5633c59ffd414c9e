"""LSTM over a whole sequence as one operator: one layer, one direction, time-major or packed.

EcoRNN's layer (Zheng et al., 2018) with less kept. Forward: products with the inputs for a chunk of time as one matrix
product, and for each step the recurrent product with the cell behind it in one pass. What backward needs is chosen by
`keep`. 0 keeps i, f, g, o and c of every step beside the output: 24 bytes a unit and step in float32, the fastest.
K keeps c every K steps: 4 + 4 / K bytes. The output already holds every h, so that backward builds all gates of K
steps again with two matrix products, and c by one pointwise pass from the c that was kept. Gradients of weights and
inputs are matrix products over a chunk; the two biases share one gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from encore.rnn import reference
from encore.rnn.arena import Arena, Layout, layout_bytes
from encore.rnn.layer import (
    Sizes,
    accumulator,
    add_product,
    added_biases,
    copied_bytes,
    input_rows,
    kernels_for,
    last_states,
    previous_states,
    sizes_of,
    started,
    usable_gradient,
    walk_of,
    widened,
    write_product,
)
from encore.rnn.registry import define
from encore.rnn.sequence import kept_rows

WEIGHTS = "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr"
FORWARD = (
    f"lstm_forward(Tensor x, Tensor h0, Tensor c0, {WEIGHTS}, Tensor? batch_sizes, bool reverse, int keep) -> "
    "(Tensor output, Tensor h_n, Tensor c_n, Tensor gates, Tensor cells)"
)
BACKWARD = (
    "lstm_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor x, Tensor h0, Tensor c0, "
    f"{WEIGHTS}, Tensor? batch_sizes, bool reverse, int keep, Tensor output, Tensor gates, Tensor cells, "
    "bool need_x, bool need_weights) -> "
    "(Tensor x, Tensor h0, Tensor c0, Tensor w_ih, Tensor w_hh, Tensor bias, Tensor w_hr)"
)


def _sizes(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    w_hr: Tensor | None, batch_sizes: Tensor | None, keep: int,
) -> Sizes:  # fmt: skip
    hidden, (batch, width) = w_hh.shape[0] // 4, h0.shape
    others: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "h0": (h0, (batch, width if w_hr is not None else hidden)),
        "c0": (c0, (batch, hidden)),
        "b_ih": (b_ih, (4 * hidden,)),
        "b_hh": (b_hh, (4 * hidden,)),
        "w_hr": (w_hr, (width, hidden)),
    }
    return sizes_of("lstm_forward", x, h0, w_ih, w_hh, batch_sizes, 4, keep, others)


# ---- forward -------------------------------------------------------------------------------------------------------


def _forward_layout(sizes: Sizes, kernels: Any, projected: bool) -> Layout:
    real, rows = sizes.real, sizes.chunk_rows
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "bias": ((4 * sizes.hidden,), real),
        "states": ((2, sizes.batch, sizes.width), real),
    }
    if not sizes.single:
        layout["weight"] = (kernels.packed_numel(4, sizes.hidden, sizes.width, real),), real
    if sizes.keep or sizes.wide:
        layout["inputs"] = (rows, 4 * sizes.hidden), real
    if not sizes.x_in_place:
        layout["x"] = (rows, sizes.inputs), real
    if projected:
        layout["raw"] = (sizes.batch, sizes.hidden), real
        layout["projection"] = (kernels.packed_numel(1, sizes.width, sizes.hidden, real),), real
    if sizes.wide:
        layout["w_ih"] = (4 * sizes.hidden, sizes.inputs), real
        layout["w_hh"] = (4 * sizes.hidden, sizes.width), real
        layout["other_bias"] = (4 * sizes.hidden,), real
        layout["cell"] = (sizes.batch, sizes.hidden), real
        if projected:
            layout["w_hr"] = (sizes.width, sizes.hidden), real
    return layout


def lstm_forward(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    w_hr: Tensor | None, batch_sizes: Tensor | None, reverse: bool, keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the layer. Returns the output, the last states, and what `lstm_backward` wants beside them."""
    sizes = _sizes(x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, keep)
    output, h_n, c_n, gates, cells = _results(sizes, x, h0, c0)
    if sizes.rows == 0:
        return output, h_n, c_n, gates, cells  # a batch of none
    walk = walk_of(sizes, batch_sizes, reverse)
    kernels = kernels_for(x.device)
    arena = Arena(_forward_layout(sizes, kernels, w_hr is not None), x.device)
    recurrent, packed = widened(arena, "w_hh", w_hh), arena.get("weight")
    if packed is not None:
        kernels.pack(recurrent, 4, transposed=False, out=packed)
    if w_hr is not None:
        kernels.pack(widened(arena, "w_hr", w_hr), 1, transposed=False, out=arena["projection"])
    input_weight, bias = widened(arena, "w_ih", w_ih), added_biases(arena, b_ih, b_hh)
    states = arena["states"]
    states[0].copy_(h0)
    states[1].copy_(h0)
    cell = arena.get("cell")
    cell = (c_n if cell is None else cell).copy_(c0)
    flat = output.view(sizes.rows, sizes.width)
    turn = 0
    for number, chunk in enumerate(walk.chunks):
        rows = slice(chunk.first, chunk.last)
        if keep and number:
            active = chunk.active[0]
            cells[chunk.kept : chunk.kept + active] = cell[:active]
        buffer = arena.get("inputs")
        inputs = gates[rows] if buffer is None else buffer[: chunk.rows]
        torch.mm(input_rows(x, chunk, arena), input_weight.t(), out=inputs)
        if packed is None:
            inputs.addmm_(states[0], recurrent.t())
        kernels.lstm_forward(
            chunk, inputs, bias, packed, arena.get("projection"), states[turn], states[1 - turn], cell,
            arena.get("raw"), flat[rows], None if keep else gates[rows], None if keep else cells[rows],
        )  # fmt: skip
        turn = (turn + len(chunk.times)) % 2
    if keep:
        cells[walk.kept :].zero_()  # shapes alone do not tell how many rows a packed sequence needs
    if c_n is not cell:
        c_n.copy_(cell)
    return output, last_states(flat, walk, h_n), c_n, gates, cells


def _results(sizes: Sizes, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty((*x.shape[:-1], sizes.width)),
        h0.new_empty(h0.shape),
        c0.new_empty(c0.shape),
        x.new_empty((0 if sizes.keep else sizes.rows, 4 * sizes.hidden)),
        x.new_empty((kept_rows(sizes.steps, sizes.batch, sizes.rows, sizes.keep), sizes.hidden), dtype=sizes.real),
    )


def _fake_forward(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    w_hr: Tensor | None, batch_sizes: Tensor | None, reverse: bool, keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _results(_sizes(x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, keep), x, h0, c0)


def forward_workspace(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    w_hr: Tensor | None, batch_sizes: Tensor | None, reverse: bool, keep: int,
) -> int:  # fmt: skip
    """Bytes that `lstm_forward` of these arguments takes aside and gives back."""
    sizes = _sizes(x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, keep)
    kernels = kernels_for(x.device)
    if sizes.rows == 0:
        return 0
    layout = _forward_layout(sizes, kernels, w_hr is not None)
    return layout_bytes(layout) + kernels.temporary_bytes(sizes.batch, sizes.hidden, sizes.real)


# ---- backward ------------------------------------------------------------------------------------------------------


def _backward_layout(
    sizes: Sizes, kernels: Any, c0: Tensor, projected: bool, need_x: bool, need_weights: bool
) -> Layout:
    real, hidden, width, rows = sizes.real, sizes.hidden, sizes.width, sizes.chunk_rows
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "grad_gates": ((rows, 4 * hidden), real),
    }
    if not sizes.single:
        layout["weight"] = (kernels.packed_numel(1, width, 4 * hidden, real),), real
    if sizes.keep:
        layout["bias"] = (4 * hidden,), real
        layout["cells"] = (rows, hidden), real
    if sizes.keep or need_weights:
        layout["previous"] = (rows, width), real
        if not sizes.x_in_place:
            layout["x"] = (rows, sizes.inputs), real
    if projected:
        layout["projection"] = (kernels.packed_numel(1, hidden, width, real),), real
        layout["grad_projected"] = (rows, width), real
        layout["raw"] = (rows, hidden), real
        if not sizes.keep:
            layout["tanh"] = (rows, hidden), real
    if sizes.wide or not c0.is_contiguous():
        layout["c0"] = (sizes.batch, hidden), real
    if sizes.wide:
        layout["other_bias"] = (4 * hidden,), real
        layout["grad_state"] = (sizes.batch, width), real
        layout["grad_cell"] = (sizes.batch, hidden), real
        layout["w_ih"] = (4 * hidden, sizes.inputs), real
        layout["w_hh"] = (4 * hidden, width), real
        if projected:
            layout["w_hr"] = (width, hidden), real
        if need_x:
            layout["grad_x"] = (rows, sizes.inputs), real
        if need_weights:
            layout["grad_w_ih"] = (4 * hidden, sizes.inputs), real
            layout["grad_w_hh"] = (4 * hidden, width), real
            layout["grad_bias"] = (4 * hidden,), real
            if projected:
                layout["grad_w_hr"] = (width, hidden), real
    return layout


def lstm_backward(
    grad_output: Tensor | None, grad_h_n: Tensor | None, grad_c_n: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor,
    w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None,
    batch_sizes: Tensor | None, reverse: bool, keep: int, output: Tensor, gates: Tensor, cells: Tensor, need_x: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what `lstm_forward` took; empty ones where they are not needed. The biases share theirs."""
    sizes = _sizes(x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, keep)
    hidden, kernels = sizes.hidden, kernels_for(x.device)
    results = _gradients(sizes, x, h0, c0, w_ih, w_hh, b_ih, w_hr, need_x, need_weights)
    if sizes.rows == 0:
        return tuple(result.zero_() for result in results)  # type: ignore[return-value]
    grad_output = usable_gradient(grad_output)
    arena = Arena(_backward_layout(sizes, kernels, c0, w_hr is not None, need_x, need_weights), x.device)
    grad_x = results[0].view(-1, sizes.inputs)
    grad_state = started(accumulator(arena, "grad_state", results[1]), grad_h_n)
    grad_cell = started(accumulator(arena, "grad_cell", results[2]), grad_c_n)
    grad_w_ih, grad_w_hh, grad_bias, grad_w_hr = (
        accumulator(arena, name, result) for name, result in zip(WEIGHT_GRADIENTS, results[3:], strict=True)
    )
    grad_bias.zero_()
    recurrent, input_weight = widened(arena, "w_hh", w_hh), widened(arena, "w_ih", w_ih)
    first_c = widened(arena, "c0", c0)
    packed = arena.get("weight")
    if packed is not None:
        kernels.pack(recurrent, 1, transposed=True, out=packed)
    if w_hr is not None:
        kernels.pack(widened(arena, "w_hr", w_hr), 1, transposed=True, out=arena["projection"])
    if keep:
        added_biases(arena, b_ih, b_hh)
    flat = output.view(sizes.rows, sizes.width)
    walk = walk_of(sizes, batch_sizes, reverse)
    for number in reversed(range(len(walk.chunks))):
        chunk = walk.chunks[number]
        rows = slice(chunk.first, chunk.last)
        grad_gates = arena["grad_gates"][: chunk.rows]
        raw = arena["raw"][: chunk.rows] if w_hr is not None else None
        grad_projected = arena["grad_projected"][: chunk.rows] if w_hr is not None else None
        if keep or need_weights:
            inputs = input_rows(x, chunk, arena)
            previous = previous_states(flat, h0, walk, chunk, arena)
        if keep:
            torch.mm(inputs, input_weight.t(), out=grad_gates)
            grad_gates.addmm_(previous, recurrent.t())
            enter, known = (cells[chunk.kept :], chunk.active[0]) if number else (first_c, sizes.batch)
            its_gates, its_cells = grad_gates, arena["cells"][: chunk.rows]
            kernels.lstm_rebuild(chunk, arena["bias"], enter, known, first_c, its_gates, its_cells, raw)
        else:
            enter, known = cells[chunk.before_row :], chunk.before_active
            its_gates, its_cells = gates[rows], cells[rows]
            if raw is not None:
                tanh = torch.tanh(its_cells, out=arena["tanh"][: chunk.rows])
                raw.copy_(its_gates[:, 3 * hidden :]).mul_(tanh)
        kernels.lstm_backward(
            chunk, packed, arena.get("projection"), grad_output, its_gates, its_cells, enter, known, first_c,
            grad_gates, grad_state, grad_cell, grad_projected, sizes.dtype,
        )  # fmt: skip
        if packed is None:
            torch.mm(grad_gates, recurrent, out=grad_state)
        if need_x:
            write_product(grad_gates, input_weight, grad_x[rows], arena.get("grad_x"))
        if need_weights:
            first = number + 1 == len(walk.chunks)
            add_product(grad_gates.t(), inputs, grad_w_ih, first)
            add_product(grad_gates.t(), previous, grad_w_hh, first)
            if b_ih is not None:
                kernels.add_column_sums(grad_gates, grad_bias)
            if raw is not None and grad_projected is not None:
                add_product(grad_projected.t(), raw, grad_w_hr, first)
    totals = grad_state, grad_cell, grad_w_ih, grad_w_hh, grad_bias, grad_w_hr
    for result, total in zip(results[1:], totals, strict=True):
        if result is not total:
            result.copy_(total)
    return results


WEIGHT_GRADIENTS = ("grad_w_ih", "grad_w_hh", "grad_bias", "grad_w_hr")


def _gradients(
    sizes: Sizes, x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None,
    w_hr: Tensor | None, need_x: bool, need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    bias = need_weights and b_ih is not None
    return (
        x.new_empty(x.shape if need_x else (0, sizes.inputs)),
        h0.new_empty(h0.shape),
        c0.new_empty(c0.shape),
        w_ih.new_empty(w_ih.shape if need_weights else (0,)),
        w_hh.new_empty(w_hh.shape if need_weights else (0,)),
        w_hh.new_empty((4 * sizes.hidden if bias else 0,)),
        w_hh.new_empty((sizes.width, sizes.hidden) if need_weights and w_hr is not None else (0,)),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, _, keep = args[3:14]
    sizes = _sizes(x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, keep)
    return _gradients(sizes, x, h0, c0, w_ih, w_hh, b_ih, w_hr, args[17], args[18])


def backward_workspace(*args: Any) -> int:
    """Bytes that `lstm_backward` of these arguments takes aside and gives back."""
    x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, _, keep = args[3:14]
    sizes, kernels = _sizes(x, h0, c0, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, keep), kernels_for(x.device)
    if sizes.rows == 0:
        return 0
    layout = _backward_layout(sizes, kernels, c0, w_hr is not None, args[17], args[18])
    return layout_bytes(layout) + kernels.temporary_bytes(sizes.batch, sizes.hidden, sizes.real) + copied_bytes(args[0])


# ---- autograd ------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sequence, _, _, gates, cells = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gates, cells)
    ctx.save_for_backward(*inputs[:9], sequence, gates, cells)
    ctx.reverse, ctx.keep = inputs[9:]


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, sequence, gates, cells = ctx.saved_tensors
    need = ctx.needs_input_grad
    grad_x, grad_h0, grad_c0, grad_w_ih, grad_w_hh, grad_bias, grad_w_hr = torch.ops.encore.lstm_backward(
        *grads[:3], *inputs, ctx.reverse, ctx.keep, sequence, gates, cells, need[0], any(need[3:8])
    )
    wanted = grad_x, grad_h0, grad_c0, grad_w_ih, grad_w_hh, grad_bias, grad_bias, grad_w_hr
    chosen = [grad if needed else None for grad, needed in zip(wanted, need[:8], strict=True)]
    if chosen[5] is not None and chosen[6] is not None:
        chosen[6] = grad_bias.clone()  # two parameters must not share their gradients' memory
    return (*chosen, None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:12])
    ctx.reverse = inputs[12]


def _differentiate_again(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *operands, batch_sizes = ctx.saved_tensors
    layer = functools.partial(reference.lstm, ctx.reverse)
    found = reference.differentiate_twice(layer, operands[:3], operands[3:], batch_sizes, grads, (0, 1, 2, 3, 4, 5, 7))
    return (*found, *[None] * 8)


define(FORWARD, lstm_forward, _fake_forward, forward_workspace, _differentiate, _save)
define(BACKWARD, lstm_backward, _fake_backward, backward_workspace, _differentiate_again, _save_backward)
