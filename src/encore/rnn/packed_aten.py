"""PyTorch's own recurrent layers on a block of packed rows, as one operator with a derivative.

What ATen runs for a packed batch depends on its lengths, step by step, and cannot be captured. So one layer, in one
direction or both, is an operator: forward runs ATen's on the rows of sequences and keeps nothing; backward runs it a
second time, for autograd, and returns ATen's gradients bit for bit. The eager lowering uses it, and the fused one if
Encore's layers do not support a call (`capture/recurrent.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from encore.rnn.packing import rows_of
from encore.rnn.registry import MADE_UP, define
from encore.rnn.sequence import fill_sizes
from encore.rnn.torch_private import recording_autograd

ONE_WAY = "Tensor{0} w_ih{1}, Tensor{0} w_hh{1}, Tensor? b_ih{1}, Tensor? b_hh{1}, Tensor? w_hr{1}"
OPERANDS = f"Tensor x, Tensor h0, Tensor? c0, {ONE_WAY.format('', '')}, {ONE_WAY.format('?', '_reverse')}"
OPTIONS = "Tensor batch_sizes, str kind, ScalarType? autocast, ScalarType y_type, ScalarType h_type, ScalarType c_type"
TENSORS = 13
"""x, two states and five weights for each direction."""
TAKEN = TENSORS + 6


def _layer(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Output and last states, without a block."""
    x, h0, c0, *weights = args[:TENSORS]
    batch_sizes, kind, autocast = args[TENSORS : TENSORS + 3]
    params = [weight for weight in weights if weight is not None]
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        results: tuple[Tensor, ...] = getattr(torch.ops.aten, kind).data(
            x[: rows_of(batch_sizes)], batch_sizes[batch_sizes > 0], h0 if c0 is None else [h0, c0], params,
            weights[2] is not None, 1, 0.0, False, weights[5] is not None,
        )  # fmt: skip
    return results


def _forward(*args: Any) -> tuple[Tensor, ...]:
    output, *states = _layer(args)
    block = output.new_empty((args[0].shape[0], output.shape[1]))
    block[: len(output)] = output
    block[len(output) :].zero_()
    return block, states[0], states[1] if len(states) > 1 else output.new_empty(0)


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    x, h0, c0 = args[:3]
    reverse, (y_type, h_type, c_type) = args[8], args[TAKEN - 3 : TAKEN]
    width = h0.shape[2] * (1 if reverse is None else 2)
    c_n = x.new_empty(0, dtype=y_type) if c0 is None else c0.new_empty(c0.shape, dtype=c_type)
    return x.new_empty((x.shape[0], width), dtype=y_type), h0.new_empty(h0.shape, dtype=h_type), c_n


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grads, given, needs = args[:3], args[3 : 3 + TAKEN], args[-1]
    with recording_autograd(), torch.enable_grad():
        leaves = [
            tensor if tensor is None else tensor.detach().requires_grad_(need)
            for tensor, need in zip(given[:TENSORS], needs, strict=True)
        ]
        output, *states = _layer((*leaves, *given[TENSORS:]))
    rows = None if grads[0] is None else grads[0][: len(output)]
    pairs = [
        (mine, grad) for mine, grad in zip((output, *states), (rows, *grads[1:]), strict=False) if grad is not None
    ]
    asked = [leaf for leaf, need in zip(leaves, needs, strict=True) if leaf is not None and need]
    found = iter(
        torch.autograd.grad([mine for mine, _ in pairs], asked, [grad for _, grad in pairs], materialize_grads=True)
    )
    return tuple(
        next(found) if leaf is not None and need else given[0].new_empty(0)
        for leaf, need in zip(leaves, needs, strict=True)
    )


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    given, needs = args[3 : 3 + TENSORS], args[-1]
    return tuple(
        tensor.new_empty(tensor.shape) if tensor is not None and need else given[0].new_empty(0)
        for tensor, need in zip(given, needs, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: TENSORS + 1])
    ctx.options = inputs[TENSORS + 1 :]
    if inputs[2] is None:
        ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:TENSORS]]
    found = torch.ops.encore.packed_aten_backward(*grads, *ctx.saved_tensors, *ctx.options, needs)
    chosen = [grad if need else None for grad, need in zip(found, needs, strict=True)]
    return (*chosen, *[None] * (TAKEN - TENSORS))


def _not_twice(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "a packed recurrent layer inside a captured graph has no second derivative; use encore.nn's layers instead"
    )


def _full(first: int) -> Any:
    """Made-up operands, of which x is the first of forward's: every sequence is as long as it can be."""

    def made_up(args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, h0, sizes = args[first], args[first + 1], args[first + TENSORS]
        fill_sizes(sizes, len(x), h0.shape[1])
        return args

    return made_up


define(
    f"packed_aten_forward({OPERANDS}, {OPTIONS}) -> (Tensor output, Tensor h_n, Tensor c_n)",
    _forward, _fake_forward, None, _differentiate, _save,
)  # fmt: skip
define(
    "packed_aten_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, "
    f"{OPERANDS}, {OPTIONS}, bool[] needs) -> ({', '.join(['Tensor'] * TENSORS)})",
    _backward, _fake_backward, None, _not_twice, lambda ctx, inputs, output: None,
)  # fmt: skip
MADE_UP[torch.ops.encore.packed_aten_forward.default] = _full(0)
MADE_UP[torch.ops.encore.packed_aten_backward.default] = _full(3)
