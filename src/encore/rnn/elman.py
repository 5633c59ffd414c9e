"""The plain recurrent layer, h' = tanh or ReLU of W x + U h + b, over a whole sequence as one operator.

Its output holds all that backward needs, 4 bytes a unit and step in float32, so that there is nothing to choose.
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

OPERANDS = (
    "Tensor x, Tensor h0, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? batch_sizes, bool reverse, "
    "bool relu"
)
FORWARD = f"elman_forward({OPERANDS}) -> (Tensor output, Tensor h_n)"
BACKWARD = (
    f"elman_backward(Tensor? grad_output, Tensor? grad_h_n, {OPERANDS}, Tensor output, bool need_x, bool need_weights) "
    "-> (Tensor x, Tensor h0, Tensor w_ih, Tensor w_hh, Tensor bias)"
)


def _sizes(
    x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    batch_sizes: Tensor | None,
) -> Sizes:  # fmt: skip
    hidden = w_hh.shape[0]
    others: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "h0": (h0, (h0.shape[0], hidden)),
        "b_ih": (b_ih, (hidden,)),
        "b_hh": (b_hh, (hidden,)),
    }
    return sizes_of("elman_forward", x, h0, w_ih, w_hh, batch_sizes, 1, 0, others)


# ---- forward -------------------------------------------------------------------------------------------------------


def _forward_layout(sizes: Sizes, kernels: Any) -> Layout:
    real, hidden = sizes.real, sizes.hidden
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "bias": ((hidden,), real),
        "states": ((2, sizes.batch, hidden), real),
        "inputs": ((sizes.chunk_rows, hidden), real),
    }
    if not sizes.single:
        layout["weight"] = (kernels.packed_numel(1, hidden, hidden, real),), real
    if not sizes.x_in_place:
        layout["x"] = (sizes.chunk_rows, sizes.inputs), real
    if sizes.wide:
        layout["other_bias"] = (hidden,), real
        layout["w_ih"] = (hidden, sizes.inputs), real
        layout["w_hh"] = (hidden, hidden), real
    return layout


def elman_forward(
    x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    batch_sizes: Tensor | None, reverse: bool, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the layer. Returns the output and the last state."""
    sizes = _sizes(x, h0, w_ih, w_hh, b_ih, b_hh, batch_sizes)
    output, h_n = _results(sizes, x, h0)
    if sizes.rows == 0:
        return output, h_n  # a batch of none
    kernels, walk = kernels_for(x.device), walk_of(sizes, batch_sizes, reverse)
    arena = Arena(_forward_layout(sizes, kernels), x.device)
    recurrent, packed = widened(arena, "w_hh", w_hh), arena.get("weight")
    if packed is not None:
        kernels.pack(recurrent, 1, transposed=False, out=packed)
    input_weight, bias, states = widened(arena, "w_ih", w_ih), added_biases(arena, b_ih, b_hh), arena["states"]
    states[0].copy_(h0)
    states[1].copy_(h0)
    flat = output.view(sizes.rows, sizes.hidden)
    turn = 0
    for chunk in walk.chunks:
        inputs = arena["inputs"][: chunk.rows]
        torch.mm(input_rows(x, chunk, arena), input_weight.t(), out=inputs)
        if packed is None:
            inputs.addmm_(states[0], recurrent.t())
        into = flat[chunk.first : chunk.last]
        kernels.elman_forward(chunk, relu, inputs, bias, packed, states[turn], states[1 - turn], into)
        turn = (turn + len(chunk.times)) % 2
    return output, last_states(flat, walk, h_n)


def _results(sizes: Sizes, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], sizes.hidden)), h0.new_empty(h0.shape)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    return _results(_sizes(*args[:7]), *args[:2])


def forward_workspace(*args: Any) -> int:
    """Bytes that `elman_forward` of these arguments takes aside and gives back."""
    sizes, kernels = _sizes(*args[:7]), kernels_for(args[0].device)
    if sizes.rows == 0:
        return 0
    return layout_bytes(_forward_layout(sizes, kernels)) + kernels.temporary_bytes(
        sizes.batch, sizes.hidden, sizes.real
    )


# ---- backward ------------------------------------------------------------------------------------------------------


def _backward_layout(sizes: Sizes, kernels: Any, need_x: bool, need_weights: bool) -> Layout:
    real, hidden, rows = sizes.real, sizes.hidden, sizes.chunk_rows
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "grad_gates": ((rows, hidden), real),
    }
    if not sizes.single:
        layout["weight"] = (kernels.packed_numel(1, hidden, hidden, real),), real
    if need_weights:
        layout["previous"] = (rows, hidden), real
        if not sizes.x_in_place:
            layout["x"] = (rows, sizes.inputs), real
    if sizes.wide:
        layout["grad_state"] = (sizes.batch, hidden), real
        layout["w_ih"] = (hidden, sizes.inputs), real
        layout["w_hh"] = (hidden, hidden), real
        if need_x:
            layout["grad_x"] = (rows, sizes.inputs), real
        if need_weights:
            layout["grad_w_ih"] = (hidden, sizes.inputs), real
            layout["grad_w_hh"] = (hidden, hidden), real
            layout["grad_bias"] = (hidden,), real
    return layout


def elman_backward(
    grad_output: Tensor | None, grad_h_n: Tensor | None, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, batch_sizes: Tensor | None, reverse: bool, relu: bool, output: Tensor,
    need_x: bool, need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what `elman_forward` took; empty ones where they are not needed. The biases share theirs."""
    sizes = _sizes(x, h0, w_ih, w_hh, b_ih, b_hh, batch_sizes)
    kernels = kernels_for(x.device)
    results = _gradients(sizes, x, h0, w_ih, w_hh, b_ih, need_x, need_weights)
    if sizes.rows == 0:
        return tuple(result.zero_() for result in results)  # type: ignore[return-value]
    grad_output = usable_gradient(grad_output)
    arena = Arena(_backward_layout(sizes, kernels, need_x, need_weights), x.device)
    grad_x = results[0].view(-1, sizes.inputs)
    grad_state = started(accumulator(arena, "grad_state", results[1]), grad_h_n)
    grad_w_ih, grad_w_hh, grad_bias = (
        accumulator(arena, name, result)
        for name, result in zip(("grad_w_ih", "grad_w_hh", "grad_bias"), results[2:], strict=True)
    )
    grad_bias.zero_()
    recurrent, input_weight, packed = widened(arena, "w_hh", w_hh), widened(arena, "w_ih", w_ih), arena.get("weight")
    if packed is not None:
        kernels.pack(recurrent, 1, transposed=True, out=packed)
    flat = output.view(sizes.rows, sizes.hidden)
    walk = walk_of(sizes, batch_sizes, reverse)
    for chunk in reversed(walk.chunks):
        rows = slice(chunk.first, chunk.last)
        grad_gates = arena["grad_gates"][: chunk.rows]
        kernels.elman_backward(chunk, relu, packed, grad_output, flat[rows], grad_gates, grad_state)
        if packed is None:
            torch.mm(grad_gates, recurrent, out=grad_state)
        if need_x:
            write_product(grad_gates, input_weight, grad_x[rows], arena.get("grad_x"))
        if need_weights:
            first = chunk is walk.chunks[-1]
            add_product(grad_gates.t(), input_rows(x, chunk, arena), grad_w_ih, first)
            add_product(grad_gates.t(), previous_states(flat, h0, walk, chunk, arena), grad_w_hh, first)
            if b_ih is not None:
                kernels.add_column_sums(grad_gates, grad_bias)
    for result, total in zip(results[1:], (grad_state, grad_w_ih, grad_w_hh, grad_bias), strict=True):
        if result is not total:
            result.copy_(total)
    return results


def _gradients(
    sizes: Sizes, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, need_x: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        x.new_empty(x.shape if need_x else (0, sizes.inputs)),
        h0.new_empty(h0.shape),
        w_ih.new_empty(w_ih.shape if need_weights else (0,)),
        w_hh.new_empty(w_hh.shape if need_weights else (0,)),
        w_hh.new_empty((sizes.hidden if need_weights and b_ih is not None else 0,)),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gradients(_sizes(*args[2:9]), *args[2:7], *args[12:])


def backward_workspace(*args: Any) -> int:
    """Bytes that `elman_backward` of these arguments takes aside and gives back."""
    sizes, kernels = _sizes(*args[2:9]), kernels_for(args[2].device)
    if sizes.rows == 0:
        return 0
    layout = _backward_layout(sizes, kernels, *args[12:])
    return layout_bytes(layout) + kernels.temporary_bytes(sizes.batch, sizes.hidden, sizes.real) + copied_bytes(args[0])


# ---- autograd ------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], output[0])
    ctx.reverse, ctx.relu = inputs[7:]


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, sequence = ctx.saved_tensors
    need = ctx.needs_input_grad
    *found, grad_bias = torch.ops.encore.elman_backward(
        *grads, *inputs, ctx.reverse, ctx.relu, sequence, need[0], any(need[2:6])
    )
    both = need[4] and need[5]
    biases = grad_bias, grad_bias.clone() if both else grad_bias  # parameters must not share their gradients' memory
    chosen = [grad if needed else None for grad, needed in zip((*found, *biases), need[:6], strict=True)]
    return (*chosen, None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])
    ctx.reverse, ctx.relu = inputs[9:11]


def _differentiate_again(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *operands, batch_sizes = ctx.saved_tensors
    layer = functools.partial(reference.elman, ctx.relu, ctx.reverse)
    found = reference.differentiate_twice(layer, operands[:2], operands[2:], batch_sizes, grads, range(5))
    return (*found, *[None] * 6)


define(FORWARD, elman_forward, _fake_forward, forward_workspace, _differentiate, _save)
define(BACKWARD, elman_backward, _fake_backward, backward_workspace, _differentiate_again, _save_backward)
