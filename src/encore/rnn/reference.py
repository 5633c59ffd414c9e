"""Recurrent layers and attention in differentiable operators, for second derivatives.

Slow, large and simple. The first derivative is the operators' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def lstm(
    reverse: bool, resets: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None, batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    h, c = h0, c0
    outputs: dict[int, Tensor] = {}
    for time, active, rows in _steps(x, batch_sizes, reverse):
        h, c = _reset(h, resets, time), _reset(c, resets, time)
        gates = F.linear(rows, w_ih, b_ih) + F.linear(h[:active], w_hh, b_hh)
        i, f, g, o = gates.chunk(4, 1)
        new_c = f.sigmoid() * c[:active] + i.sigmoid() * g.tanh()
        new_h = o.sigmoid() * new_c.tanh()
        if w_hr is not None:
            new_h = F.linear(new_h, w_hr)
        outputs[time] = new_h
        h, c = torch.cat((new_h, h[active:])), torch.cat((new_c, c[active:]))
    return _joined(outputs, batch_sizes), h, c


def gru(
    reverse: bool, resets: Tensor | None, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None,
    b_hh: Tensor | None, batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = h0
    outputs: dict[int, Tensor] = {}
    for time, active, rows in _steps(x, batch_sizes, reverse):
        h = _reset(h, resets, time)
        x_r, x_z, x_n = F.linear(rows, w_ih, b_ih).chunk(3, 1)
        h_r, h_z, h_n = F.linear(h[:active], w_hh, b_hh).chunk(3, 1)
        z = (x_z + h_z).sigmoid()
        n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
        outputs[time] = n + z * (h[:active] - n)
        h = torch.cat((outputs[time], h[active:]))
    return _joined(outputs, batch_sizes), h


def elman(
    relu: bool, reverse: bool, resets: Tensor | None, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = h0
    outputs: dict[int, Tensor] = {}
    for time, active, rows in _steps(x, batch_sizes, reverse):
        h = _reset(h, resets, time)
        total = F.linear(rows, w_ih, b_ih) + F.linear(h[:active], w_hh, b_hh)
        outputs[time] = total.relu() if relu else total.tanh()
        h = torch.cat((outputs[time], h[active:]))
    return _joined(outputs, batch_sizes), h


def additive_scores(
    eps: float | None, query: Tensor, keys: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, _: Tensor | None = None,
) -> tuple[Tensor]:  # fmt: skip
    """The scores of every query and key, by way of the whole middle `[B, Tq, Tk, H]`."""
    middle = query.unsqueeze(2) + keys.unsqueeze(1)
    if bias is not None:
        middle = middle + bias
    if eps is not None:
        middle = F.layer_norm(middle, middle.shape[-1:], norm_weight, norm_bias, eps)
    return (torch.tanh(middle) @ weight,)


def dot_attention(
    added: Sequence[Tensor], hidden: Sequence[Tensor], fills: Sequence[float], scale: float, kept: Tensor | None,
    factor: float, query: Tensor, keys: Tensor, values: Tensor, _: Tensor | None = None,
) -> tuple[Tensor]:  # fmt: skip
    """Attention to values by `query @ keys`, by way of all scores."""
    scores = query @ keys * scale
    for mask in added:
        scores = scores + mask
    for mask, fill in zip(hidden, fills, strict=True):
        scores = scores.masked_fill(mask, fill)
    weights = scores.softmax(-1)
    return ((weights if kept is None else weights * (kept * factor)) @ values,)


def _steps(x: Tensor, batch_sizes: Tensor | None, reverse: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Time, rows that are active, and their inputs, in the order of the walk."""
    steps = list(x.unbind(0)) if batch_sizes is None else list(x.split(batch_sizes.tolist()))
    for time in reversed(range(len(steps))) if reverse else range(len(steps)):
        yield time, steps[time].shape[0], steps[time]


def _reset(state: Tensor, resets: Tensor | None, time: int) -> Tensor:
    """The state, zero where a sequence begins."""
    return state if resets is None else state.masked_fill(resets[time].unsqueeze(1), 0)


def _joined(outputs: dict[int, Tensor], batch_sizes: Tensor | None) -> Tensor:
    in_order = [outputs[time] for time in sorted(outputs)]
    return torch.stack(in_order) if batch_sizes is None else torch.cat(in_order)


def _on_rows(
    layer: Callable[..., tuple[Tensor, ...]], operands: Sequence[Tensor | None], batch_sizes: Tensor | None
) -> tuple[Tensor, ...]:
    """The layer on the rows that are there, where they lie in a block (`packing.py`)."""
    x = operands[0]
    assert x is not None
    if batch_sizes is None or int(batch_sizes.sum()) == len(x):
        return layer(*operands, batch_sizes)
    rows = int(batch_sizes.sum())
    output, *states = layer(x[:rows], *operands[1:], batch_sizes[batch_sizes > 0])
    return F.pad(output, (0, 0, 0, len(x) - rows)), *states


def differentiate_twice(
    layer: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor | None], operands: Sequence[Tensor | None],
    batch_sizes: Tensor | None, grads: Sequence[Tensor | None], wanted: Sequence[int],
) -> list[Tensor | None]:  # fmt: skip
    """The derivative of a layer's backward operator.

    `given` are the gradients of the layer's outputs that the operator took, `operands` what the layer took; `grads` are
    the gradients of the operator's results, of which number k is the gradient of operand `wanted[k]`. Returns gradients
    of `given` and `operands`.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        before = [None if grad is None else grad.view_as(grad) for grad in given]
        inputs = [None if operand is None else operand.view_as(operand) for operand in operands]
        for tensor in (*before, *inputs):
            if tensor is not None and not tensor.requires_grad:
                tensor.requires_grad_()
        outputs = _on_rows(layer, inputs, batch_sizes)
        pairs = [(output, grad) for output, grad in zip(outputs, before, strict=True) if grad is not None]
        asked = [
            (tensor, grad)
            for operand, grad in zip(wanted, grads, strict=True)
            if grad is not None and (tensor := inputs[operand]) is not None
        ]
        if not pairs or not asked:
            return [None] * len((*before, *inputs))
        first = torch.autograd.grad(
            [output for output, _ in pairs], [operand for operand, _ in asked], [grad for _, grad in pairs],
            create_graph=True, materialize_grads=True,
        )  # fmt: skip
        everything = [tensor for tensor in (*before, *inputs) if tensor is not None]
        found = iter(
            torch.autograd.grad(
                list(first), everything, [grad for _, grad in asked], create_graph=again, allow_unused=True
            )
        )
    return [None if tensor is None else next(found) for tensor in (*before, *inputs)]
