"""ReLU and max-pooling: the gradient is masked while it is still small, by the sign of what came out of the pool.

Forward is `p = max_pool(y)`, backward masks by `y` what unpooling has spread out. Each element of `p` is one of `y`,
and unpooling puts its gradient there and zeros elsewhere. So masking the gradient of `p` by `p`, before it is spread
out, gives the same bits, windows that overlap included, NaNs too (both let them pass); and `p` is what the next layer
keeps anyway, while `y`, the larger one, is not kept any more. Gist keeps a bit an element of `y` instead.

What is pooled may also be several activations concatenated (`cat`), if each of them is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.editor import Editor
from encore.graph.needs import BackwardNeeds
from encore.graph.values import Ref
from encore.rewrite.op_builder import OpBuilder
from encore.rewrite.queries import exported, result_of

aten = torch.ops.aten
CHANNELS = 1
POSITIONS = {
    aten.max_pool2d_with_indices_backward.default: 7,
    torch.ops.encore.max_pool2d_backward.default: 8,
}
"""Unpooling, and where it takes the positions."""


@dataclass(frozen=True, slots=True)
class _Match:
    unpool: Op
    pooled: int
    threshold: float
    masks: Sequence[Op]


def apply(graph: Graph) -> Graph:
    """The graph with such masks moved, where nothing larger has to be kept for it."""
    editor = Editor(graph)
    builder = OpBuilder(editor)
    needs = BackwardNeeds(graph)
    for op in graph.ops:
        match = _match(graph, op) if op.target in POSITIONS else None
        if match is not None and _pays(graph, needs, match) and _can_be_laid_out(builder, match):
            _move(builder, match)
    return editor.finish()


def _match(graph: Graph, unpool: Op) -> _Match | None:
    """An unpooling whose result is masked, in whole or in parts, by what was pooled."""
    positions = unpool.args[POSITIONS[unpool.target]]
    pool = graph.producer(positions.value)
    if pool is None or pool.target is not aten.max_pool2d_with_indices.default:
        return None
    source, (pooled, _) = pool.args[0].value, pool.writes
    spread = result_of(unpool)
    leaving = exported(graph)
    masks = [_mask(graph, reader, spread, source) for reader in _readers(graph, spread)]
    found = [mask for mask in masks if mask is not None]
    thresholds = {mask.args[2] for mask in found}
    results = {value for mask in found for value in (spread, *mask.writes)}
    whole = len(found) == len(masks) and len(thresholds) == 1 and not leaving & results
    if pooled is None or not whole or not _cover(graph, source, found):
        return None
    return _Match(unpool, pooled, thresholds.pop(), found)


def _readers(graph: Graph, value: int) -> list[Op]:
    return [graph.ops[reader] for reader in graph.values[value].readers]


def _mask(graph: Graph, reader: Op, spread: int, source: int) -> Op | None:
    """The operator that masks the unpooled gradient, or the part of it that this view is, by what was pooled there."""
    if reader.target is aten.threshold_backward.default:
        return reader if reader.args[:2] == (Ref(spread), Ref(source)) else None
    whole = graph.producer(source)
    if reader.kind is not OpClass.VIEW or whole is None or not _side_by_side(graph, whole):
        return None
    (part,) = reader.writes
    readers = [] if part is None else _readers(graph, part)
    if part is None or len(readers) != 1 or readers[0].target is not aten.threshold_backward.default:
        return None
    gradient, mask, _ = readers[0].args
    where = _windows(graph, whole).get(mask.value)
    seen = graph.values[part]
    stride = graph.values[spread].stride
    if gradient != Ref(part) or where is None or seen.stride != stride or seen.shape != graph.values[mask.value].shape:
        return None
    return readers[0] if seen.offset - graph.values[spread].offset == where * stride[CHANNELS] else None


def _side_by_side(graph: Graph, op: Op) -> bool:
    rank = 0 if op.writes[0] is None else len(graph.values[op.writes[0]].shape)
    dim = op.args[1] if len(op.args) > 1 else 0
    return op.target is aten.cat.default and rank == 4 and dim in (CHANNELS, CHANNELS - rank) and len(op.reads) > 1


def _windows(graph: Graph, cat: Op) -> dict[int, int]:
    """Which channel each part begins at; parts that stand there twice are left out."""
    begins: dict[int, int] = {}
    channel = 0
    parts = [part.value for part in cat.args[0]]
    for part in parts:
        if parts.count(part) == 1:
            begins[part] = channel
        channel += graph.values[part].shape[CHANNELS]
    return begins


def _cover(graph: Graph, source: int, masks: Sequence[Op]) -> bool:
    """Return whether everything that was unpooled is masked, once."""
    masked = [mask.args[1].value for mask in masks]
    whole = graph.producer(source)
    if masked == [source]:
        return True
    return (
        whole is not None and _side_by_side(graph, whole) and sorted(masked) == sorted(p.value for p in whole.args[0])
    )


def _pays(graph: Graph, needs: BackwardNeeds, match: _Match) -> bool:
    """Return whether the pooled activation is kept anyway, or smaller than what is no longer needed."""
    pooled = graph.values[match.pooled].storage
    masked = {graph.values[mask.args[1].value].storage for mask in match.masks}
    assert pooled is not None
    if not needs.may_be_read(pooled) or masked & needs.changing:
        return False
    freed = sum(graph.storages[s].bytes for s in masked if s is not None and not needs.is_kept_whole(s))
    return needs.is_kept_whole(pooled) or graph.storages[pooled].bytes <= freed


def _can_be_laid_out(builder: OpBuilder, match: _Match) -> bool:
    """Return whether a copy of what was unpooled can be laid out as each mask's result was."""
    return all(_copying(builder, mask) is not None for mask in match.masks)


def _copying(builder: OpBuilder, mask: Op) -> torch.memory_format | None:
    unpooled, result = (builder.editor.graph.values[value] for value in (mask.args[0].value, mask.writes[0] or 0))
    with builder.mode:
        lying = torch.empty_strided(unpooled.shape, unpooled.stride, device="meta")
    return builder.copying_into(lying, result.stride)


def _move(builder: OpBuilder, match: _Match) -> None:
    editor, unpool = builder.editor, match.unpool
    gradient = editor.graph.ops[unpool.id].args[0].value  # a mask that was there may have been moved already
    args = (Ref(gradient), Ref(match.pooled), match.threshold)
    masked = builder.before(unpool, f"{unpool.name}_masked", aten.threshold_backward.default, args)
    editor.read_instead(unpool, gradient, masked)
    for mask in match.masks:
        result = result_of(mask)
        gradient = mask.args[0].value
        if gradient == unpool.writes[0] and editor.graph.values[gradient].stride == editor.graph.values[result].stride:
            for reader in _readers(editor.original, result):
                editor.read_instead(reader, result, gradient)
            editor.remove(mask)
            continue
        format_ = _copying(builder, mask)
        options = {} if format_ is torch.preserve_format else {"memory_format": format_}
        editor.adopt(editor.op_after(mask, f"{mask.name}_copy", aten.clone.default, (Ref(gradient),), options), result)
