"""Additive attention's scores and their gradients on GPUs, by `kernels/gpu/scores.py`.

The workspace: partial sums of the weights' gradients, at most `GROUPS` rows for each of four, and with a LayerNorm four
numbers a score. ScoreOperands whose rows are not contiguous are copied first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from encore.kernels.gpu import recurrent, scores
from encore.kernels.gpu.launcher import launch
from encore.kernels.gpu.tiles import tile_for
from encore.rnn.layer import copied_bytes, with_contiguous_rows
from encore.rnn.score_kernels import ScoreGradients, ScoreOperands

GROUPS = 256
"""Programs that queries are dealt out to, at most, in each tile of units: enough to fill a GPU."""


def forward_bytes(operands: ScoreOperands) -> int:
    """Copies of operands whose rows are not contiguous."""
    vectors = operands.weight, operands.bias, operands.norm_weight, operands.norm_bias
    return sum(copied_bytes(each) for each in (operands.query, operands.keys, *vectors))


def backward_bytes(operands: ScoreOperands) -> int:
    """Those copies, the moments of a LayerNorm, and partial sums."""
    moments = 0 if operands.eps is None else 4 * _scores(operands)
    partial = (4 * _groups(operands) + 1) * operands.hidden
    copies = forward_bytes(operands) + _scores(operands) * operands.query.element_size()
    return copies + (moments + partial) * operands.real.itemsize


def forward(operands: ScoreOperands, result: Tensor) -> None:
    given = query, keys, *_ = _operands(operands)
    batch, queries, count = operands.shape
    tile = tile_for(operands.hidden)
    tiles = -(-count // tile.rows)
    strides = *query.stride()[:2], *keys.stride()[:2]
    launch(
        scores.score_forward, (batch * queries * tiles,), *given, result, queries, count, tiles, operands.hidden,
        *strides, EPS=operands.eps, KEYS=tile.rows, UNITS=tile.units,
    )  # fmt: skip


def backward(operands: ScoreOperands, grad: Tensor, results: ScoreGradients, add_keys: bool) -> None:
    given = query, keys, *_ = _operands(operands)
    batch, queries, count = operands.shape
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    hidden, rows, tile = operands.hidden, batch * queries, tile_for(operands.hidden)
    tiles, wide_tiles = -(-count // tile.rows), -(-hidden // tile.units)
    sizes = hidden, *query.stride()[:2], *keys.stride()[:2], *grad.stride()[:2]
    constants = {"EPS": operands.eps, "KEYS": tile.rows, "UNITS": tile.units}
    moments = None
    if operands.eps is not None:
        moments = torch.empty((4, rows, count), dtype=operands.real, device=query.device)
        launch(
            scores.score_moments, (rows * tiles,), *given, grad, moments, queries, count, tiles, rows, *sizes,
            **constants,
        )  # fmt: skip
    for_keys, for_query, *for_vectors = results
    if for_keys.numel():
        launch(
            scores.score_keys_backward, (batch * tiles, wide_tiles), *given, grad, moments, for_keys, queries, count,
            tiles, rows, *sizes, ADD=add_keys, **constants,
        )  # fmt: skip
    shared = any(each.numel() for each in for_vectors)
    if not shared and not for_query.numel():
        return
    groups = _groups(operands)
    sums = torch.empty((4, groups, hidden), dtype=operands.real, device=query.device) if shared else None
    launch(
        scores.score_queries_backward, (groups, wide_tiles), *given, grad, moments,
        for_query if for_query.numel() else None, sums, queries, count, rows, groups, *sizes, **constants,
    )  # fmt: skip
    if sums is not None:
        total = torch.empty(hidden, dtype=operands.real, device=query.device)
        tiling = {"ROWS": tile.rows, "UNITS": tile.units}
        for result, partial in zip(for_vectors, sums, strict=True):
            if result.numel():
                launch(recurrent.column_sums, (wide_tiles,), partial, total.zero_(), groups, hidden, **tiling)
                result.copy_(total)


def _operands(operands: ScoreOperands) -> list[Any]:
    vectors = operands.weight, operands.bias, operands.norm_weight, operands.norm_bias
    return [with_contiguous_rows(each) for each in (operands.query, operands.keys, *vectors)]


def _scores(operands: ScoreOperands) -> int:
    batch, queries, keys = operands.shape
    return batch * queries * keys


def _groups(operands: ScoreOperands) -> int:
    batch, queries, _ = operands.shape
    return min(GROUPS, batch * queries)
