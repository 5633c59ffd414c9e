"""Max-pooling saves where in its window each maximum lies in four bits: Gist's pooling map; lossless.

PyTorch saves eight bytes a result, and the layer's input for its size. `encore::max_pool_map` and its backward compute
the same results of the same ties, NaNs and overlapping windows, two to four times as fast on large activations. Small
ones are left as they are: there is nothing to gain.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from encore.codecs.native import SUFFIX, is_compiled
from encore.codecs.pool_map import LAST, MAX_POOL_MAP, MAX_POOL_MAP_BACKWARD, MOST
from encore.graph import Graph, Op
from encore.graph.sized_ops import SIZED
from encore.graph.values import Ref, contiguous_strides
from encore.rewrite.matching import Match, OpPattern
from encore.rewrite.op_builder import OpBuilder
from encore.rewrite.queries import device_of, readers_of, result_of
from encore.rewrite.rules import Rule, apply_rules

aten = torch.ops.aten
UNPOOL = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d_with_indices_backward.default,
}
DEFAULTS: tuple[Any, ...] = ([], [0], [1], False)
"""Stride, padding, dilation and rounding of a pooling layer by default."""
FEW = 1 << 12
"""Bytes of positions that are not worth an operator of our own."""


def apply(graph: Graph) -> Graph:
    """The graph with such layers."""
    return apply_rules(graph, RULES)


def _can_be_mapped(match: Match) -> bool:
    """Return whether only the layer's backward reads the positions, the map can tell those in a window apart, and the
    gradients are laid out as the map's backward lays them out."""
    graph, pool = match.graph, match.op
    pooled, positions = pool.writes
    if pooled is None or positions is None or positions in match.scope.leaving or graph.values[positions].bytes < FEW:
        return False
    unpools, backward = readers_of(graph, positions), UNPOOL[pool.target]
    if not unpools or any(op.forward or op.target not in (backward, SIZED[backward]) for op in unpools):
        return False
    source, kernel = graph.values[pool.args[0].value], pool.args[1]
    if source.dtype not in SUFFIX or math.prod(kernel) > MOST or not is_compiled(device_of(graph, source.id)):
        return False
    if len(kernel) == 1:  # one number for all dimensions, which PyTorch's functions take and ours do not
        return False
    layouts = {contiguous_strides(source.shape), _channels_last(source.shape, len(kernel))}
    alike = all(graph.values[result_of(op)].stride == source.stride for op in unpools)
    return source.stride in layouts and alike and graph.values[pooled].dtype == source.dtype


def _channels_last(shape: tuple[int, ...], dims: int) -> tuple[int, ...]:
    if len(shape) != dims + 2:
        return contiguous_strides(shape)
    return tuple(torch.empty(shape, device="meta", memory_format=LAST[dims]).stride())


def _window(op: Op) -> tuple[Any, ...]:
    """Kernel, stride, padding, dilation and rounding of a pooling layer."""
    given = op.args[1:]
    return (*given, *DEFAULTS[len(given) - 1 :])


def _keep_map(builder: OpBuilder, match: Match) -> None:
    editor, pool = builder.editor, match.op
    pooled, positions = pool.writes
    assert pooled is not None
    assert positions is not None
    source, args = match.graph.values[pool.args[0].value], (pool.args[0], *_window(pool))
    _, coded = builder.described(MAX_POOL_MAP, args)
    forward = editor.op_after(pool, pool.name, MAX_POOL_MAP, args)
    forward.returns_tuple = True
    editor.adopt(forward, pooled)
    map_ = editor.result(forward, coded.shape, coded.dtype, str(coded.device))
    editor.graph.values[map_].name = f"{pool.name}_map"
    channels_last = source.stride != contiguous_strides(source.shape)
    for unpool in readers_of(match.graph, positions):
        settings = (list(source.shape), channels_last, *_window(pool))
        builder.replace(unpool, MAX_POOL_MAP_BACKWARD, (unpool.args[0], Ref(map_), *settings))


RULES = (Rule(OpPattern(tuple(UNPOOL), ..., forward=True), _keep_map, _can_be_mapped),)
