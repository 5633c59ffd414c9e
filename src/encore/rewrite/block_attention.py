"""Dot-product attention that was written out becomes `encore::dot_attention`: of all pairs of a query and a key, some
heads' scores at a time are in memory.

Plain operators write scores and their softmax whole and keep one of them for backward, or make it again there, whole.
The operator keeps query, keys and values, and takes both passes some heads at a time through one small workspace
(`encore.rnn.dot`). For long sequences that is faster, too, since the workspace stays in a cache; whether it is for
these shapes is timed. Results come out with other roundings at most.
"""

from __future__ import annotations

from typing import Any

import torch

from encore.graph import Graph
from encore.graph.editor import Editor
from encore.graph.values import Ref, is_contiguous
from encore.rewrite.dot_attention import DotAttention, find_dot_attentions
from encore.rewrite.judge import Judge
from encore.rewrite.queries import result_of


def apply(graph: Graph, judge: Judge) -> Graph:
    """The graph with attention in operators of its own where that pays."""
    editor = Editor(graph)
    for found in find_dot_attentions(graph):
        if judge.blocks_pay(found, _dtype(graph, found)):
            _replace(editor, found)
    return editor.finish()


def _dtype(graph: Graph, found: DotAttention) -> torch.dtype:
    dtype = graph.values[found.query].dtype
    assert dtype is not None
    return dtype


def _hidden(editor: Editor, found: DotAttention, mask: int, shown: bool) -> Ref:
    """A mask of what is hidden, where the graph may have one of what is shown."""
    if not shown:
        return Ref(mask)
    value = editor.graph.values[mask]
    turned = editor.op_after(found.mix, f"{value.name}_hidden", torch.ops.aten.logical_not.default, (Ref(mask),))
    return Ref(editor.result(turned, value.shape, torch.bool, "cpu"))


def _kept(editor: Editor, found: DotAttention, dtype: torch.dtype) -> tuple[Ref | None, float]:
    """Which weights dropout keeps, and what it multiplies them by. The same coins are flipped at the same place, with
    the sizes of scores that are nowhere in memory."""
    if found.draw is None:
        return None, 1.0
    mask = result_of(found.draw)
    _, p = found.draw.args
    editor.make_instead(found.draw, torch.ops.encore.dropout_mask.default, torch.bool)
    draw, shape = editor.graph.ops[found.draw.id], editor.graph.values[mask].shape
    nowhere = [0] * len(shape)
    spread = editor.op_before(
        draw, f"{draw.name}_sizes", torch.ops.aten.as_strided.default, (Ref(found.query), list(shape), nowhere)
    )
    sizes = editor.view_result(spread, found.query, shape, nowhere, 0)
    draw.args, draw.reads = (Ref(sizes), p), (sizes,)
    return editor.viewed(found.mix, mask, found.shape), torch.ones((), dtype=dtype).div_(1 - p).item()


def _replace(editor: Editor, found: DotAttention) -> None:
    """One attention on its way into operators. What made scores is removed with its last reader."""
    dtype = _dtype(editor.original, found)
    matrices = zip((found.query, found.keys, found.values), found.shapes.values(), strict=True)
    operands: tuple[Any, ...] = (
        *(editor.viewed(found.mix, number, shape) for number, shape in matrices),
        [Ref(mask) for mask in found.added],
        [_hidden(editor, found, *mask) for mask in zip(found.hidden, found.shown, strict=True)],
        found.fills,
        found.scale,
        *_kept(editor, found, dtype),
    )
    op = editor.op_after(found.mix, f"{found.softmax.name}_mix", torch.ops.encore.dot_attention.default, operands)
    op.module, op.source = found.softmax.module, found.softmax.source
    result = (*found.shape[:3], found.sizes[1])
    mixed = result_of(found.mix)
    editor.become(op, mixed, editor.result(op, result, dtype, "cpu"))
    if found.grad is None:
        return
    first = min(found.backward, key=lambda op: op.id)
    grad = editor.viewed(first, found.grad, result)
    need = [name in found.gradients for name in found.shapes]
    op = editor.op_after(
        first, f"{found.softmax.name}_mix_backward", torch.ops.encore.dot_attention_backward.default,
        (grad, *operands, *need),
    )  # fmt: skip
    op.module, op.source, op.returns_tuple = found.softmax.module, found.softmax.source, True
    views = []
    for name, shape in found.shapes.items():
        if name not in found.gradients:
            op.writes = (*op.writes, None)
            continue
        leaves = found.gradients[name]
        assert is_contiguous(editor.graph.values[leaves])
        made = editor.result(op, shape, dtype, "cpu")
        editor.graph.values[made].name += f"_{name}"
        views.append((leaves, made))
    for leaves, made in views:
        editor.become(op, leaves, made)
