"""GRU over a whole sequence as one operator: one layer, one direction, time-major or packed.

Like `lstm.py`, with h as its only state. `keep=0` keeps the gates of every step, 20 bytes a unit and step with the
output in float32; any other keeps the output alone, 4 bytes, since h of every step is all that building the gates
again takes. Gates lie side by side as n, r, z and the recurrent part of n (which r is multiplied with), so that both
products write neighbouring columns.
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
)
from encore.rnn.registry import define

OPERANDS = (
    "Tensor x, Tensor h0, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? batch_sizes, bool reverse"
)
FORWARD = f"gru_forward({OPERANDS}, int keep) -> (Tensor output, Tensor h_n, Tensor gates)"
BACKWARD = (
    f"gru_backward(Tensor? grad_output, Tensor? grad_h_n, {OPERANDS}, int keep, Tensor output, Tensor gates, "
    "bool need_x, bool need_weights) -> (Tensor x, Tensor h0, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh)"
)
WEIGHT_GRADIENTS = ("grad_w_ih", "grad_w_hh", "grad_b_ih", "grad_b_hh")


def _sizes(
    keep: int, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    batch_sizes: Tensor | None,
) -> Sizes:  # fmt: skip
    hidden = w_hh.shape[0] // 3
    others: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "h0": (h0, (h0.shape[0], hidden)),
        "b_ih": (b_ih, (3 * hidden,)),
        "b_hh": (b_hh, (3 * hidden,)),
    }
    # Nothing is kept at certain steps, so that chunks are as long as products want them.
    return sizes_of("gru_forward", x, h0, w_ih, w_hh, batch_sizes, 3, keep, others, chunked_by_keep=False)


def _input_products(inputs: Tensor, weight: Tensor, gates: Tensor) -> None:
    """Products with the inputs for n, r and z."""
    hidden = weight.shape[0] // 3
    torch.mm(inputs, weight[2 * hidden :].t(), out=gates[:, :hidden])
    torch.mm(inputs, weight[: 2 * hidden].t(), out=gates[:, hidden : 3 * hidden])


def _add_recurrent_products(states: Tensor, weight: Tensor, gates: Tensor) -> None:
    """Products with the states: added for r and z, apart for n."""
    hidden = weight.shape[0] // 3
    gates[:, hidden : 3 * hidden].addmm_(states, weight[: 2 * hidden].t())
    torch.mm(states, weight[2 * hidden :].t(), out=gates[:, 3 * hidden :])


def _biases(arena: Arena, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor:
    """The biases as the gates lie, in the arena's `bias`."""
    into = arena["bias"].zero_()
    hidden = into.shape[0] // 4
    if b_ih is not None:
        into[:hidden].copy_(b_ih[2 * hidden :])
        into[hidden : 3 * hidden].copy_(b_ih[: 2 * hidden])
    if b_hh is not None:
        into[hidden:].add_(widened(arena, "other_bias", b_hh))
    return into


# ---- forward -------------------------------------------------------------------------------------------------------


def _forward_layout(sizes: Sizes, kernels: Any) -> Layout:
    real, hidden, rows = sizes.real, sizes.hidden, sizes.chunk_rows
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "bias": ((4 * hidden,), real),
        "states": ((2, sizes.batch, hidden), real),
    }
    if not sizes.single:
        layout["weight"] = (kernels.packed_numel(3, hidden, hidden, real),), real
    if sizes.keep or sizes.wide:
        layout["inputs"] = (rows, 4 * hidden), real
    if not sizes.x_in_place:
        layout["x"] = (rows, sizes.inputs), real
    if sizes.wide:
        layout["other_bias"] = (3 * hidden,), real
        layout["w_ih"] = (3 * hidden, sizes.inputs), real
        layout["w_hh"] = (3 * hidden, hidden), real
    return layout


def gru_forward(
    x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    batch_sizes: Tensor | None, reverse: bool, keep: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the layer. Returns the output, the last state, and what `gru_backward` wants beside them."""
    sizes = _sizes(keep, x, h0, w_ih, w_hh, b_ih, b_hh, batch_sizes)
    output, h_n, gates = _results(sizes, x, h0)
    if sizes.rows == 0:
        return output, h_n, gates  # a batch of none
    kernels, walk = kernels_for(x.device), walk_of(sizes, batch_sizes, reverse)
    arena = Arena(_forward_layout(sizes, kernels), x.device)
    recurrent, packed = widened(arena, "w_hh", w_hh), arena.get("weight")
    if packed is not None:
        kernels.pack(recurrent, 3, transposed=False, out=packed)
    input_weight, bias, states = widened(arena, "w_ih", w_ih), _biases(arena, b_ih, b_hh), arena["states"]
    states[0].copy_(h0)
    states[1].copy_(h0)
    flat = output.view(sizes.rows, sizes.hidden)
    turn = 0
    for chunk in walk.chunks:
        rows = slice(chunk.first, chunk.last)
        buffer = arena.get("inputs")
        inputs = gates[rows] if buffer is None else buffer[: chunk.rows]
        _input_products(input_rows(x, chunk, arena), input_weight, inputs)
        if packed is None:
            _add_recurrent_products(states[0], recurrent, inputs)
        kernels.gru_forward(
            chunk, inputs, bias, packed, states[turn], states[1 - turn], flat[rows],
            None if keep else gates[rows],
        )  # fmt: skip
        turn = (turn + len(chunk.times)) % 2
    return output, last_states(flat, walk, h_n), gates


def _results(sizes: Sizes, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty((*x.shape[:-1], sizes.hidden)),
        h0.new_empty(h0.shape),
        x.new_empty((0 if sizes.keep else sizes.rows, 4 * sizes.hidden)),
    )


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _results(_sizes(args[8], *args[:7]), *args[:2])


def forward_workspace(*args: Any) -> int:
    """Bytes that `gru_forward` of these arguments takes aside and gives back."""
    sizes, kernels = _sizes(args[8], *args[:7]), kernels_for(args[0].device)
    if sizes.rows == 0:
        return 0
    return layout_bytes(_forward_layout(sizes, kernels)) + kernels.temporary_bytes(
        sizes.batch, sizes.hidden, sizes.real
    )


# ---- backward ------------------------------------------------------------------------------------------------------


def _backward_layout(sizes: Sizes, kernels: Any, need_x: bool, need_weights: bool) -> Layout:
    real, hidden, rows = sizes.real, sizes.hidden, sizes.chunk_rows
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "grad_gates": ((rows, 4 * hidden), real),
        "previous": ((rows, hidden), real),
    }
    if not sizes.single:
        layout["weight"] = (kernels.packed_numel(1, hidden, 3 * hidden, real),), real
    if sizes.keep:
        layout["bias"] = (4 * hidden,), real
    if need_weights:
        layout["grad_biases"] = (4 * hidden,), real
    if (sizes.keep or need_weights) and not sizes.x_in_place:
        layout["x"] = (rows, sizes.inputs), real
    if sizes.wide:
        layout["other_bias"] = (3 * hidden,), real
        layout["grad_state"] = (sizes.batch, hidden), real
        layout["w_ih"] = (3 * hidden, sizes.inputs), real
        layout["w_hh"] = (3 * hidden, hidden), real
        if need_x:
            layout["grad_x"] = (rows, sizes.inputs), real
        if need_weights:
            layout["grad_w_ih"] = (3 * hidden, sizes.inputs), real
            layout["grad_w_hh"] = (3 * hidden, hidden), real
    return layout


def gru_backward(
    grad_output: Tensor | None, grad_h_n: Tensor | None, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, batch_sizes: Tensor | None, reverse: bool, keep: int, output: Tensor,
    gates: Tensor, need_x: bool, need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what `gru_forward` took; empty ones where they are not needed."""
    sizes = _sizes(keep, x, h0, w_ih, w_hh, b_ih, b_hh, batch_sizes)
    hidden, kernels = sizes.hidden, kernels_for(x.device)
    results = _gradients(sizes, x, h0, w_ih, w_hh, b_ih, need_x, need_weights)
    if sizes.rows == 0:
        return tuple(result.zero_() for result in results)  # type: ignore[return-value]
    grad_output = usable_gradient(grad_output)
    arena = Arena(_backward_layout(sizes, kernels, need_x, need_weights), x.device)
    grad_x = results[0].view(-1, sizes.inputs)
    grad_state = started(accumulator(arena, "grad_state", results[1]), grad_h_n)
    grad_w_ih, grad_w_hh = accumulator(arena, "grad_w_ih", results[2]), accumulator(arena, "grad_w_hh", results[3])
    if need_weights:
        grad_biases = arena["grad_biases"].zero_()
    recurrent, input_weight = widened(arena, "w_hh", w_hh), widened(arena, "w_ih", w_ih)
    packed = arena.get("weight")
    if packed is not None:
        kernels.pack(recurrent, 1, transposed=True, out=packed)
    if keep:
        _biases(arena, b_ih, b_hh)
    flat = output.view(sizes.rows, hidden)
    walk = walk_of(sizes, batch_sizes, reverse)
    for chunk in reversed(walk.chunks):
        rows = slice(chunk.first, chunk.last)
        grad_gates = arena["grad_gates"][: chunk.rows]
        previous = previous_states(flat, h0, walk, chunk, arena)
        if keep or need_weights:
            inputs = input_rows(x, chunk, arena)
        if keep:
            _input_products(inputs, input_weight, grad_gates)
            _add_recurrent_products(previous, recurrent, grad_gates)
            kernels.gru_rebuild(arena["bias"], grad_gates)
        kernels.gru_backward(
            chunk, packed, grad_output, grad_gates if keep else gates[rows], previous, grad_gates, grad_state,
            sizes.dtype,
        )  # fmt: skip
        if packed is None:
            grad_state.addmm_(grad_gates[:, hidden:], recurrent)
        grad_n, grad_rz = grad_gates[:, :hidden], grad_gates[:, hidden : 3 * hidden]
        if need_x:
            buffer = arena.get("grad_x")
            into = grad_x[rows] if buffer is None else buffer[: chunk.rows]
            torch.mm(grad_rz, input_weight[: 2 * hidden], out=into).addmm_(grad_n, input_weight[2 * hidden :])
            if buffer is not None:
                grad_x[rows] = into
        if need_weights:
            first = chunk is walk.chunks[-1]
            add_product(grad_rz.t(), inputs, grad_w_ih[: 2 * hidden], first)
            add_product(grad_n.t(), inputs, grad_w_ih[2 * hidden :], first)
            add_product(grad_gates[:, hidden:].t(), previous, grad_w_hh, first)
            if b_ih is not None:
                kernels.add_column_sums(grad_gates, grad_biases)
    for result, total in ((results[1], grad_state), (results[2], grad_w_ih), (results[3], grad_w_hh)):
        if result is not total:
            result.copy_(total)
    if need_weights and b_ih is not None:
        results[4][: 2 * hidden].copy_(grad_biases[hidden : 3 * hidden])
        results[4][2 * hidden :].copy_(grad_biases[:hidden])
        results[5].copy_(grad_biases[hidden:])
    return results


def _gradients(
    sizes: Sizes, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, need_x: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    biases = 3 * sizes.hidden if need_weights and b_ih is not None else 0
    return (
        x.new_empty(x.shape if need_x else (0, sizes.inputs)),
        h0.new_empty(h0.shape),
        w_ih.new_empty(w_ih.shape if need_weights else (0,)),
        w_hh.new_empty(w_hh.shape if need_weights else (0,)),
        w_hh.new_empty((biases,)),
        w_hh.new_empty((biases,)),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = _sizes(args[10], *args[2:9])
    return _gradients(sizes, *args[2:7], *args[13:])


def backward_workspace(*args: Any) -> int:
    """Bytes that `gru_backward` of these arguments takes aside and gives back."""
    sizes, kernels = _sizes(args[10], *args[2:9]), kernels_for(args[2].device)
    if sizes.rows == 0:
        return 0
    layout = _backward_layout(sizes, kernels, *args[13:])
    return layout_bytes(layout) + kernels.temporary_bytes(sizes.batch, sizes.hidden, sizes.real) + copied_bytes(args[0])


# ---- autograd ------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sequence, _, gates = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gates)
    ctx.save_for_backward(*inputs[:7], sequence, gates)
    ctx.reverse, ctx.keep = inputs[7:]


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, sequence, gates = ctx.saved_tensors
    need = ctx.needs_input_grad
    found = torch.ops.encore.gru_backward(
        *grads[:2], *inputs, ctx.reverse, ctx.keep, sequence, gates, need[0], any(need[2:6])
    )
    return (*[grad if needed else None for grad, needed in zip(found, need[:6], strict=True)], None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])
    ctx.reverse = inputs[9]


def _differentiate_again(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *operands, batch_sizes = ctx.saved_tensors
    layer = functools.partial(reference.gru, ctx.reverse)
    found = reference.differentiate_twice(layer, operands[:2], operands[2:], batch_sizes, grads, range(6))
    return (*found, *[None] * 7)


define(FORWARD, gru_forward, _fake_forward, forward_workspace, _differentiate, _save)
define(BACKWARD, gru_backward, _fake_backward, backward_workspace, _differentiate_again, _save_backward)
