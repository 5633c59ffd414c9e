"""Dot-product attention as one operator that keeps only its operands: partial forward propagation.

    scores = scale * (query @ keys) + added...,  then `fills[i]` wherever `hidden[i]` is true
    result = noise * softmax(scores) @ values,  noise being `factor` where dropout has `kept` a weight, 0 elsewhere

Vaswani et al. 2017. Query, keys and values have B x H x T x D numbers, scores and their softmax B x H x Tq x Tk each;
written out, PyTorch computes two or three such tensors and keeps one or two for backward. Here some heads at a time go
through a workspace, forward and once more backward ("partial forward propagation" in EcoRNN, Zheng et al. 2018), by the
very operators that the formula is written in: rows that are hidden altogether, fills that are finite and infinite ones
come out as they would. Where one head is larger than the workspace, it goes through some queries at a time, and the
gradients of keys and values are added up: that is all that is rounded otherwise.

`F.scaled_dot_product_attention` does this with a running softmax, which is faster for long sequences, keeps the result
and a number a row, and treats fully masked rows differently. A model that calls it is not changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.errors import OptionError
from encore.rnn import reference
from encore.rnn.registry import define

aten = torch.ops.aten
OPERANDS = (
    "Tensor query, Tensor keys, Tensor values, Tensor[] added, Tensor[] hidden, float[] fills, float scale, "
    "Tensor? kept, float factor"
)  # fmt: skip
FORWARD = f"dot_attention({OPERANDS}) -> Tensor"
BACKWARD = (
    f"dot_attention_backward(Tensor grad, {OPERANDS}, bool need_query, bool need_keys, bool need_values) -> "
    "(Tensor query, Tensor keys, Tensor values)"
)
WORKSPACE = 1 << 20
"""Bytes of scores that are computed at once: about the size of a core's second cache."""
TYPES = (torch.float32, torch.float64)
"""oneDNN would multiply narrower ones, and copy operands into layouts of its own."""
DotGradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DotOperands:
    """What both operators take, checked: `[B, H, Tq, D]`, `[B, H, D, Tk]` and `[B, H, Tk, E]`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    added: Sequence[Tensor]
    hidden: Sequence[Tensor]
    fills: Sequence[float]
    scale: float
    kept: Tensor | None
    factor: float

    def __post_init__(self) -> None:
        query, keys, values = self.query, self.keys, self.values
        shapes = f"{tuple(query.shape)}, {tuple(keys.shape)} and {tuple(values.shape)}"
        if not query.dim() == keys.dim() == values.dim() == 4:
            raise OptionError(f"attention takes [B, H, Tq, D], [B, H, D, Tk] and [B, H, Tk, E]; got {shapes}")
        if not query.shape[:2] == keys.shape[:2] == values.shape[:2]:
            raise OptionError(f"query, keys and values must agree in batch and heads; got {shapes}")
        if query.shape[3] != keys.shape[2] or keys.shape[3] != values.shape[2]:
            raise OptionError(f"query, keys and values must agree as matrices; got {shapes}")
        for tensor in (query, keys, values, *self.added):
            if tensor.dtype not in TYPES or tensor.dtype != query.dtype or tensor.device != query.device:
                raise OptionError("attention is computed in float32 or float64, of one type and on one device")
        if len(self.hidden) != len(self.fills) or any(mask.dtype != torch.bool for mask in self.hidden):
            raise OptionError("every mask of hidden scores must be boolean, and have a fill value")
        if self.kept is None and self.factor != 1:
            raise OptionError(f"a factor belongs to weights that are dropped; got {self.factor} and no mask")
        if self.kept is not None and (self.kept.dtype != torch.bool or tuple(self.kept.shape) != self.shape):
            raise OptionError(f"what dropout keeps must be boolean, {self.shape}; got {tuple(self.kept.shape)}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the scores."""
        return self.query.shape[0], self.query.shape[1], self.query.shape[2], self.keys.shape[3]

    @property
    def result(self) -> tuple[int, int, int, int]:
        return *self.shape[:3], self.values.shape[3]

    def laid_out(self) -> DotOperands:
        """With masks spread out, heads of all sequences in one row where that takes no copies, and matrices laid out as
        products read them."""
        query, keys, values = (_as_matrices(tensor) for tensor in (self.query, self.keys, self.values))
        added, hidden = ([mask.expand(self.shape) for mask in masks] for masks in (self.added, self.hidden))
        kept = [] if self.kept is None else [self.kept]
        spread = (query, keys, values, *added, *hidden, *kept)
        if all(_heads_in_a_row(tensor) for tensor in spread):
            query, keys, values = (tensor.flatten(0, 1)[None] for tensor in (query, keys, values))
            added, hidden, kept = ([mask.flatten(0, 1)[None] for mask in masks] for masks in (added, hidden, kept))
        coins = kept[0] if kept else None
        return DotOperands(query, keys, values, added, hidden, self.fills, self.scale, coins, self.factor)

    def block(self) -> tuple[int, int]:
        """How many heads, and how many queries of each, go through the workspace at once."""
        _, heads, queries, keys = self.shape
        room = WORKSPACE // self.query.element_size()
        some = max(1, min(queries, room // keys))
        return (max(1, min(heads, room // (queries * keys))) if some == queries else 1), some

    def blocks(self) -> Iterator[tuple[int, slice, slice]]:
        """Sequence, heads and queries of every block, in order."""
        batch, heads, queries, _ = self.shape
        some_heads, some_queries = self.block()
        for number in range(batch):
            for head in range(0, heads, some_heads):
                for row in range(0, queries, some_queries):
                    yield (
                        number,
                        slice(head, min(head + some_heads, heads)),
                        slice(row, min(row + some_queries, queries)),
                    )

    def fill_in(self, scores: Tensor, where: tuple[int, slice, slice]) -> None:
        """Turn the scores of a block into weights, in place."""
        for mask in self.added:
            scores.add_(mask[where])
        for mask, fill in zip(self.hidden, self.fills, strict=True):
            scores.masked_fill_(mask[where], fill)
        aten._softmax.out(scores, -1, False, out=scores)

    def noise(self, room: Sequence[Tensor], query: Tensor, where: tuple[int, slice, slice]) -> Tensor | None:
        """1 for the weights of a block that dropout keeps, 0 for the others, in a workspace of its own; products have
        the factor."""
        return None if self.kept is None else _part(room[-1], query, self).copy_(self.kept[where])


def _as_matrices(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one whose matrices no product could read where they are."""
    return tensor if _reads_in_place(tensor) else tensor.contiguous()


def _reads_in_place(tensor: Tensor) -> bool:
    (rows, columns), (row, column) = tensor.shape[2:], tensor.stride()[2:]
    return (column == 1 and (rows == 1 or row >= columns)) or (row == 1 and (columns == 1 or column >= rows))


def _heads_in_a_row(tensor: Tensor) -> bool:
    batch, heads = tensor.shape[:2]
    return batch == 1 or heads == 1 or tensor.stride(0) == heads * tensor.stride(1)


def _is_empty(operands: DotOperands) -> bool:
    return 0 in (*operands.shape, operands.query.shape[3], operands.values.shape[3])


# ---- forward -------------------------------------------------------------------------------------------------------


def dot_attention(*args: Any) -> Tensor:
    """Means of the values under the softmax of the scores."""
    operands = DotOperands(*args)
    result = operands.query.new_empty(operands.result)
    if _is_empty(operands):
        return result.zero_()
    operands = operands.laid_out()
    rows = result.view(operands.result)
    room, *more = _workspaces(operands, 1)
    for where in operands.blocks():
        query, target = operands.query[where], rows[where]
        number, heads, _ = where
        scores = _part(room, query, operands)
        torch.baddbmm(scores, query, operands.keys[number, heads], beta=0, alpha=operands.scale, out=scores)
        operands.fill_in(scores, where)
        if (noise := operands.noise(more, query, where)) is not None:
            scores.mul_(noise)
        torch.baddbmm(target, scores, operands.values[number, heads], beta=0, alpha=operands.factor, out=target)
    return result


def _workspaces(operands: DotOperands, count: int) -> list[Tensor]:
    heads, queries = operands.block()
    size = heads * queries * operands.shape[3]
    return [operands.query.new_empty(size) for _ in range(count + (operands.kept is not None))]


def _part(room: Tensor, query: Tensor, operands: DotOperands) -> Tensor:
    shape = (*query.shape[:2], operands.shape[3])
    return room[: math.prod(shape)].view(shape)


def _fake_forward(*args: Any) -> Tensor:
    operands = DotOperands(*args)
    return operands.query.new_empty(operands.result)


def forward_workspace(*args: Any) -> int:
    """The workspace of `dot_attention` with these arguments, in bytes."""
    return _workspace_bytes(DotOperands(*args), 1)


def _workspace_bytes(operands: DotOperands, count: int) -> int:
    if _is_empty(operands):
        return 0
    copied = [one for one in (operands.query, operands.keys, operands.values) if not _reads_in_place(one)]
    heads, queries = operands.laid_out().block()
    scores = (count + (operands.kept is not None)) * heads * queries * operands.shape[3]
    return (sum(one.numel() for one in copied) + scores) * operands.query.element_size()


# ---- backward ------------------------------------------------------------------------------------------------------


def dot_attention_backward(grad: Tensor, *args: Any) -> DotGradients:
    """DotGradients of query, keys and values; empty ones if they are not needed."""
    operands = _checked(grad, *args)
    need = args[9:]
    results = _gradients(operands, *need)
    if _is_empty(operands) or not any(need):
        for result in results:
            result.zero_()
        return results
    rows = _as_matrices(grad)
    operands = operands.laid_out()
    if operands.shape[:2] != tuple(rows.shape[:2]):
        rows = rows.reshape(operands.result)
    for_query, for_keys, for_values = (
        result.view(like.shape) if needed else None
        for result, like, needed in zip(results, (operands.query, operands.keys, operands.values), need, strict=True)
    )
    middle = for_query is not None or for_keys is not None
    room, *more = _workspaces(operands, 2 if middle else 1)
    scale, factor = operands.scale, operands.factor
    for where in operands.blocks():
        number, heads, queries = where
        query, keys, values = operands.query[where], operands.keys[number, heads], operands.values[number, heads]
        weights = _part(room, query, operands)
        torch.baddbmm(weights, query, keys, beta=0, alpha=scale, out=weights)
        operands.fill_in(weights, where)
        before = 0 if queries.start == 0 else 1
        found = _part(more[0], query, operands) if middle else weights
        noise = operands.noise(more, query, where)
        if for_values is not None:
            dropped = weights if noise is None else torch.mul(weights, noise, out=found)
            target = for_values[number, heads]
            torch.baddbmm(target, dropped.transpose(1, 2), rows[where], beta=before, alpha=factor, out=target)
        if not middle:
            continue
        torch.baddbmm(found, rows[where], values.transpose(1, 2), beta=0, alpha=factor, out=found)
        if noise is not None:
            found.mul_(noise)
        aten._softmax_backward_data.out(found, weights, -1, found.dtype, grad_input=found)
        for mask in operands.hidden:
            found.masked_fill_(mask[where], 0)
        if for_query is not None:
            target = for_query[where]
            torch.baddbmm(target, found, keys.transpose(1, 2), beta=0, alpha=scale, out=target)
        if for_keys is not None:
            target = for_keys[number, heads]
            torch.baddbmm(target, query.transpose(1, 2), found, beta=before, alpha=scale, out=target)
    return results


def _checked(grad: Tensor, *args: Any) -> DotOperands:
    operands = DotOperands(*args[:9])
    if tuple(grad.shape) != operands.result or grad.dtype != operands.query.dtype:
        raise OptionError(
            f"the gradient of this attention is {operands.result} in {operands.query.dtype}; "
            f"got {tuple(grad.shape)} in {grad.dtype}"
        )
    return operands


def _gradients(operands: DotOperands, *need: bool) -> DotGradients:
    given = (operands.query, operands.keys, operands.values)
    query, keys, values = (
        one.new_empty(one.shape if needed else (0,)) for one, needed in zip(given, need, strict=True)
    )
    return query, keys, values


def _fake_backward(grad: Tensor, *args: Any) -> DotGradients:
    return _gradients(_checked(grad, *args), *args[9:])


def backward_workspace(grad: Tensor, *args: Any) -> int:
    """The workspace of `dot_attention_backward` with these arguments, in bytes."""
    operands = _checked(grad, *args)
    if not any(args[9:]):
        return 0
    flat = operands.laid_out().shape[:2] != operands.shape[:2]
    copied = not _reads_in_place(grad) or (flat and not _heads_in_a_row(grad))
    return _workspace_bytes(operands, 2 if any(args[9:11]) else 1) + copied * grad.numel() * grad.element_size()


# ---- autograd ------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if any(mask.requires_grad for mask in inputs[3]):
        raise OptionError("what is added to scores gets no gradient here: write the attention out, or detach it")
    _save_operands(ctx, (), *inputs)


def _save_operands(
    ctx: Any, grads: tuple[Tensor, ...], query: Tensor, keys: Tensor, values: Tensor, added: Sequence[Tensor],
    hidden: Sequence[Tensor], fills: Sequence[float], scale: float, kept: Tensor | None, factor: float,
) -> None:  # fmt: skip
    ctx.save_for_backward(*grads, query, keys, values, kept, *added, *hidden)
    ctx.counts, ctx.rest = (len(added), len(hidden)), (fills, scale, factor)


def _restored(ctx: Any) -> tuple[Any, ...]:
    tensors = list(ctx.saved_tensors)
    added, hidden = ctx.counts
    masks = len(tensors) - added - hidden
    *operands, kept = tensors[:masks]
    fills, scale, factor = ctx.rest
    return (*operands, tensors[masks : masks + added], tensors[masks + added :], fills, scale, kept, factor)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[:3]
    found = torch.ops.encore.dot_attention_backward(grad, *_restored(ctx), *need)
    return (*(one if needed else None for one, needed in zip(found, need, strict=True)), *[None] * 6)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    _save_operands(ctx, inputs[:1], *inputs[1:10])


def _differentiate_again(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """By way of the formula itself: correct, but large."""
    grad, query, keys, values, *rest = _restored(ctx)
    formula = functools.partial(reference.dot_attention, *rest)
    found = reference.differentiate_twice(formula, [grad], [query, keys, values], None, grads, (0, 1, 2))
    return (*found, *[None] * 9)


define(FORWARD, dot_attention, _fake_forward, forward_workspace, _differentiate, _save)
define(BACKWARD, dot_attention_backward, _fake_backward, backward_workspace, _differentiate_again, _save_backward)
