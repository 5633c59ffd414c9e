"""Max-pooling keeps for backward where in its window each maximum stood, in four bits: Gist's map; lossless.

PyTorch keeps eight bytes a result, and the layer's input for its size. `encore::max_pool_map` and its backward make the
same results of the same ties, NaNs and overlapping windows, two to four times as fast on maps of some size. Small ones
are left alone: there is nothing to gain.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from encore.codecs.native import SUFFIX, is_compiled
from encore.codecs.pool_map import LAST, MAX_POOL_MAP, MAX_POOL_MAP_BACKWARD, MOST
from encore.graph import Graph, Op
from encore.graph.editor import Editor
from encore.graph.sized_ops import SIZED
from encore.graph.values import Ref, contiguous_strides
from encore.rewrite.matmuls import device_of, exported
from encore.rewrite.trial import Trial

aten = torch.ops.aten
UNPOOL = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d_with_indices_backward.default,
}
DEFAULTS: tuple[Any, ...] = ([], [0], [1], False)
"""What a pooling layer takes for stride, padding, dilation and rounding where nothing is said."""
FEW = 1 << 12
"""Bytes of positions that are not worth an operator of our own."""


def pool_maps(graph: Graph) -> Graph:
    """The graph with such layers."""
    editor = Editor(graph)
    trial = Trial(editor)
    leaving = exported(graph)
    for op in graph.ops:
        if op.target not in UNPOOL or not op.forward or op.kwargs or op.writes[1] in leaving:
            continue
        unpools = _unpools(graph, op)
        if unpools and _fits(graph, op, unpools):
            _replace(trial, op, unpools)
    return editor.finish()


def window(op: Op) -> tuple[Any, ...]:
    """Kernel, stride, padding, dilation and rounding of a pooling layer."""
    given = op.args[1:]
    return (*given, *DEFAULTS[len(given) - 1 :])


def _unpools(graph: Graph, pool: Op) -> list[Op]:
    """The backward operators that read the positions; none where somebody else does."""
    positions = pool.writes[1]
    backward = UNPOOL[pool.target]
    readers = [] if positions is None else [graph.ops[reader] for reader in graph.values[positions].readers]
    known = all(reader.target in (backward, SIZED[backward]) and not reader.forward for reader in readers)
    return readers if known else []


def _fits(graph: Graph, pool: Op, unpools: list[Op]) -> bool:
    """Can the map tell the window's positions apart, and is the gradient laid out as the map's reader lays it out?"""
    source, results = graph.values[pool.args[0].value], graph.values[pool.writes[0] or 0]
    if source.dtype not in SUFFIX or math.prod(pool.args[1]) > MOST or not is_compiled(device_of(graph, source.id)):
        return False
    if len(pool.args[1]) == 1:  # one number for all dimensions, which PyTorch's functions take and ours do not
        return False
    if graph.values[pool.writes[1] or 0].bytes < FEW:
        return False
    made = [graph.values[unpool.writes[0] or 0] for unpool in unpools]
    layouts = {contiguous_strides(source.shape), last(source.shape, len(pool.args[1]))}
    alike = all(value.stride == source.stride for value in made)
    return pool.writes[0] is not None and source.stride in layouts and alike and results.dtype == source.dtype


def last(shape: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """The strides of such a tensor with channels last."""
    if len(shape) != dims + 2:
        return contiguous_strides(shape)
    return tuple(torch.empty(shape, device="meta", memory_format=LAST[dims]).stride())


def _replace(trial: Trial, pool: Op, unpools: list[Op]) -> None:
    editor = trial.editor
    source = editor.graph.values[pool.args[0].value]
    settings = window(pool)
    pooled, _ = pool.writes
    assert pooled is not None
    _, coded = trial.made(MAX_POOL_MAP, (pool.args[0], *settings))
    channels_last = source.stride != contiguous_strides(source.shape)
    forward = editor.op_after(pool, pool.name, MAX_POOL_MAP, (pool.args[0], *settings))
    forward.returns_tuple = True
    editor.adopt(forward, pooled)
    map_ = editor.result(forward, coded.shape, coded.dtype, str(coded.device))
    editor.graph.values[map_].name = f"{pool.name}_map"
    for unpool in unpools:
        (result,) = unpool.writes
        assert result is not None
        args = (unpool.args[0], Ref(map_), list(source.shape), channels_last, *settings)
        backward = editor.op_after(unpool, unpool.name, MAX_POOL_MAP_BACKWARD, args)
        editor.adopt(backward, result)
