"""Products with the same right side that do not wait for each other become one product with stacked left sides.

The input projections of an unrolled recurrent layer: `x_t @ W` needs no state, so all time steps (or `chunk` of them)
go into one large product before the loop, whose rows the steps then read. In backward the same holds for
`dgates_t @ W`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encore.graph import Graph
from encore.graph.editor import Editor
from encore.graph.values import Ref, is_contiguous
from encore.rewrite.judge import Judge
from encore.rewrite.matmuls import Product, depends_on, products
from encore.rewrite.queries import device_of, exported

aten = torch.ops.aten


def apply(graph: Graph, judge: Judge, chunk: int) -> Graph:
    """The graph with independent products of one weight stacked, `chunk` at a time."""
    groups: dict[tuple[object, ...], list[Product]] = {}
    leaving = exported(graph)
    for found in products(graph):
        result, left = graph.values[found.result], graph.values[found.left]
        vector = found.bias is None or len(graph.values[found.bias].shape) == 1
        if vector and is_contiguous(result) and found.result not in leaving:
            key = (found.right, found.bias, left.shape, left.dtype, found.op.forward, found.op.target)
            groups.setdefault(key, []).append(found)
    editor = Editor(graph)
    for members in groups.values():
        if len(members) >= chunk:
            tainted = depends_on(graph, members)
            free = [member for member in members if member.left not in tainted and member.right not in tainted]
            for start in range(0, len(free), chunk):
                part = free[start : start + chunk]
                if len(part) == chunk and judge.stacking_pays(graph, part):
                    _stack(editor, part)
    return editor.finish()


def _stack(editor: Editor, part: Sequence[Product]) -> None:
    graph = editor.graph
    first = part[0]
    rows, inner = graph.values[first.left].shape
    columns = graph.values[first.right].shape[1]
    dtype, device = graph.values[first.result].dtype, device_of(graph, first.result)
    assert dtype is not None
    makers = [maker for member in part if (maker := graph.producer(member.left)) is not None]
    last = max([*makers, graph.ops[first.op.id]], key=editor.place_of)
    name = graph.ops[first.op.id].name
    lefts = editor.op_after(last, f"{name}_rows", aten.cat.default, ([Ref(member.left) for member in part],))
    lefts.forward = first.op.forward
    stacked_left = editor.result(lefts, (len(part) * rows, inner), dtype, device)
    bias = () if first.bias is None else (Ref(first.bias),)
    matmul = editor.op_after(lefts, f"{name}_stacked", first.op.target, (*bias, Ref(stacked_left), Ref(first.right)))
    stacked = editor.result(matmul, (len(part) * rows, columns), dtype, device)
    split = editor.op_after(matmul, f"{name}_split", aten.split.Tensor, (Ref(stacked), rows))
    split.returns_tuple = True
    for position, member in enumerate(part):
        editor.move_into(member.result, stacked, position * rows * columns)
        editor.adopt(split, member.result)
