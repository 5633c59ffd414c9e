"""Additive attention's scores and their gradients in PyTorch's own operators, a block of the middle at a time: without
a C++ compiler, and on other devices than the CPU.

A block is some sequences, some of their queries, and all keys or some of them, so that its memory is bounded for any
lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from encore.rnn.score_kernels import ScoreGradients, ScoreOperands

aten = torch.ops.aten
BLOCK = 1 << 18
"""Numbers of the middle that are computed at once: about the size of a core's second cache."""
BLOCKS_ALIVE = 7
"""No more tensors of a block's size are alive at once, small ones included."""


def forward_bytes(operands: ScoreOperands) -> int:
    return _alive(operands) * operands.real.itemsize


def backward_bytes(operands: ScoreOperands) -> int:
    """Blocks, and gradients of a block's keys and of all weights."""
    sequences, _, _ = _block(operands)
    sums = sequences * operands.keys.shape[1] * operands.hidden + 4 * operands.hidden
    return (_alive(operands) + sums) * operands.real.itemsize


def forward(operands: ScoreOperands, scores: Tensor) -> None:
    real = operands.real
    weight = operands.weight.to(real)
    for sequences, queries, keys in _blocks(operands):
        middle = _sums(operands, sequences, queries, keys)
        if operands.eps is not None:
            scale, shift = (_wide(each, real) for each in (operands.norm_weight, operands.norm_bias))
            middle = F.layer_norm(middle, (operands.hidden,), scale, shift, operands.eps)
        scores[sequences, queries, keys] = middle.tanh_() @ weight


def backward(operands: ScoreOperands, grad: Tensor, results: ScoreGradients, add_keys: bool) -> None:
    real, like = operands.real, operands.query
    for_keys, for_query, *for_weights = results
    totals = [torch.zeros(operands.hidden, dtype=real, device=like.device) for _ in range(4)]
    done: tuple[slice, slice] | None = None
    grad_keys = grad_query = like
    for sequences, queries, keys in _blocks(operands):
        if done is None or done[0] != sequences:
            whole = operands.keys[sequences]
            given = for_keys[sequences] if add_keys else None
            grad_keys = torch.zeros(whole.shape, dtype=real, device=like.device) if given is None else given.to(real)
        if done != (sequences, queries):
            grad_query = torch.zeros(operands.query[sequences, queries].shape, dtype=real, device=like.device)
        done = sequences, queries
        found = _middle_gradient(operands, grad[sequences, queries, keys].to(real), *done, keys, totals)
        grad_keys[:, keys] += found.sum(1)
        grad_query += found.sum(2)
        if keys.stop == operands.keys.shape[1]:
            totals[1] += grad_query.sum((0, 1))
            if for_query.numel():
                for_query[done] = grad_query
            if for_keys.numel() and queries.stop == operands.query.shape[1]:
                for_keys[sequences] = grad_keys
    for result, total in zip(for_weights, totals, strict=True):
        if result.numel():
            result.copy_(total)


def _middle_gradient(
    operands: ScoreOperands, grad: Tensor, sequences: slice, queries: slice, keys: slice, totals: list[Tensor]
) -> Tensor:
    """The gradient of the sums of a block; gradients of weight and LayerNorm are added to the totals."""
    real, shape = operands.real, [operands.hidden]
    middle = _sums(operands, sequences, queries, keys)
    if operands.eps is None:
        known = middle.tanh_()
    else:
        scale, shift = (_wide(each, real) for each in (operands.norm_weight, operands.norm_bias))
        known, *moments = aten.native_layer_norm(middle, shape, scale, shift, operands.eps)
        known.tanh_()
    totals[0] += grad.flatten() @ known.flatten(0, 2)
    found = known.square_().neg_().add_(1).mul_(operands.weight).mul_(grad.unsqueeze(-1))
    if operands.eps is None:
        return found
    ones = torch.ones(shape, dtype=real, device=grad.device)
    found, for_scale, for_shift = aten.native_layer_norm_backward(
        found, middle, shape, *moments, ones if scale is None else scale, ones, [True, True, True]
    )
    totals[2] += for_scale
    totals[3] += for_shift
    return found


def _sums(operands: ScoreOperands, sequences: slice, queries: slice, keys: slice) -> Tensor:
    """Queries plus keys of a block, in memory of their own."""
    query = operands.query[sequences, queries].to(operands.real)
    if operands.bias is not None:
        query = query + operands.bias
    return query.unsqueeze(2) + operands.keys[sequences, keys].to(operands.real).unsqueeze(1)


def _wide(tensor: Tensor | None, real: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(real)


def _block(operands: ScoreOperands) -> tuple[int, int, int]:
    """How many sequences, queries and keys a block has."""
    batch, queries, keys = operands.shape
    some_keys = max(1, min(keys, BLOCK // operands.hidden))
    some_queries = max(1, min(queries, BLOCK // (some_keys * operands.hidden)))
    return max(1, min(batch, BLOCK // (some_queries * some_keys * operands.hidden))), some_queries, some_keys


def _blocks(operands: ScoreOperands) -> Iterator[tuple[slice, slice, slice]]:
    """Sequence by sequence, and there query by query."""
    sequences, queries, keys = (
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(operands.shape, _block(operands), strict=True)
    )
    return ((some, those, these) for some in sequences for those in queries for these in keys)


def _alive(operands: ScoreOperands) -> int:
    sequences, queries, keys = _block(operands)
    rows = sequences * (queries + keys + queries * keys)
    return BLOCKS_ALIVE * rows * operands.hidden
