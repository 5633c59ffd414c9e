"""Positions that backward needs (of maxima, rows, classes) cross to it in one, two or four bytes, not eight; lossless.

Their bound follows from the operator that reads them: the size of a plane, of a table, of a dimension. Backward widens
them again right before they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.editor import Editor
from encore.graph.needs import BackwardNeeds, Need, Reading
from encore.graph.sized_ops import SIZE
from encore.graph.values import Ref, map_refs
from encore.rewrite.queries import device_of, result_of

aten, own = torch.ops.aten, torch.ops.encore
NARROW = (torch.int8, torch.int16, torch.int32)
Bound = Callable[[Graph, Op], int]


def _plane(dims: int) -> Bound:
    """Positions count within what was pooled: so many dimensions of a tensor, or of a size argument."""

    def bound(graph: Graph, op: Op) -> int:
        source = op.args[SIZE]
        shape = graph.values[source.value].shape if isinstance(source, Ref) else source
        return math.prod(shape[-dims:])

    return bound


def _classes(graph: Graph, op: Op) -> int:
    """Classes, and the one that is not counted."""
    scores, ignored = graph.values[op.args[1].value], op.args[5]
    return max(scores.shape[1 if len(scores.shape) > 1 else 0], abs(ignored) + 1)


def _along_dimension(graph: Graph, op: Op) -> int:
    shape = graph.values[op.args[0].value].shape
    return shape[op.args[1]] if shape else 1


BOUNDS: Mapping[Any, Bound] = {
    aten.max_pool2d_with_indices_backward.default: _plane(2),
    aten.max_pool3d_with_indices_backward.default: _plane(3),
    aten.adaptive_max_pool2d_backward.default: _plane(2),
    aten.adaptive_max_pool3d_backward.default: _plane(3),
    own.max_pool2d_backward.default: _plane(2),
    own.max_pool3d_backward.default: _plane(3),
    own.adaptive_max_pool2d_backward.default: _plane(2),
    own.adaptive_max_pool3d_backward.default: _plane(3),
    aten.embedding_dense_backward.default: lambda graph, op: int(op.args[2]),
    aten.nll_loss_backward.default: _classes,
    aten.nll_loss2d_backward.default: _classes,
    aten.gather.default: _along_dimension,
    aten.scatter.src: _along_dimension,
    aten.scatter.value: _along_dimension,
    aten.scatter_add.default: _along_dimension,
    aten.index_select.default: _along_dimension,
    aten.index_add.default: _along_dimension,
}
"""A reader of positions -> a number that none of them reaches, counted from either end."""


def apply(graph: Graph) -> Graph:
    """The graph with positions that cross from forward to backward made narrow on the way."""
    editor = Editor(graph)
    needs = BackwardNeeds(graph)
    for storage, readings in needs.of.items():
        number = graph.storages[storage].values[0]
        value, maker = graph.values[number], graph.producer(number)
        if storage in needs.held or value.dtype is not torch.int64 or maker is None:
            continue
        dtype = _narrowest(graph, number, readings)
        if dtype is not None:
            _cross_as(editor, maker, number, readings, dtype)
    return editor.finish()


def _narrowest(graph: Graph, number: int, readings: list[Reading]) -> torch.dtype | None:
    """The narrowest type for what these readers take; None where one of them takes something else."""
    if any(reading.need is not Need.POSITION or _views(graph, reading.value, number) is None for reading in readings):
        return None
    bounds = [BOUNDS[reading.op.target](graph, reading.op) for reading in readings if reading.op.target in BOUNDS]
    limit = min(bounds, default=2**63)
    return next((dtype for dtype in NARROW if limit <= torch.iinfo(dtype).max), None)


def _views(graph: Graph, value: int, owner: int) -> list[Op] | None:
    """The views that lead from the owner of some memory to a value; None where they are not that simple."""
    views: list[Op] = []
    while value != owner:
        view = graph.producer(value)
        if view is None or view.kind is not OpClass.VIEW or len(view.writes) != 1 or len(view.reads) != 1:
            return None
        views.append(view)
        (value,) = view.reads
    return views[::-1]


def _cross_as(editor: Editor, maker: Op, number: int, readings: list[Reading], dtype: torch.dtype) -> None:
    value, device = editor.original.values[number], device_of(editor.original, number)
    narrow = editor.op_after(maker, f"{value.name}_narrow", aten._to_copy.default, (Ref(number),), {"dtype": dtype})
    small = editor.result(narrow, value.shape, dtype, device)
    first = min((reading.op for reading in readings), key=lambda op: op.id)
    back = {"dtype": torch.int64}
    widen = editor.op_before(first, f"{value.name}_wide", aten._to_copy.default, (Ref(small),), back)
    wide = editor.result(widen, value.shape, torch.int64, device)
    for made in (small, wide):
        editor.graph.values[made].stride = value.stride
    for reading in readings:
        editor.read_instead(reading.op, reading.value, _seen(editor, reading, number, wide))


def _seen(editor: Editor, reading: Reading, number: int, wide: int) -> int:
    """The wide positions through the views that the reader takes of them."""
    seen = wide
    for view in _views(editor.original, reading.value, number) or ():
        made = result_of(view)
        value, base = editor.original.values[made], editor.graph.values[seen]
        operand = dict.fromkeys(view.reads, Ref(seen))
        args, kwargs = map_refs((view.args, view.kwargs), operand.__getitem__)
        again = editor.op_before(reading.op, f"{value.name}_of_{reading.op.name}", view.target, args, kwargs)
        again.returns_tuple = view.returns_tuple
        seen = editor.view_result(again, seen, value.shape, value.stride, value.offset - base.offset)
    return seen
