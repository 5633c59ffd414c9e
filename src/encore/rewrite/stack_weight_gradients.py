"""The gradient of a shared weight as one product over stacked operands instead of a sum of T products.

`sum_t left_t @ right_t` is `[left_1 ... left_T] @ [right_1; ...; right_T]`: a long inner dimension suits vector
libraries better than T short ones. It costs a copy of the operands and keeps them until the chunk is complete.
Works on the chains that `fold_additions` leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encore.graph import Graph
from encore.graph.editor import Editor
from encore.graph.values import Ref
from encore.rewrite.judge import Judge
from encore.rewrite.matmuls import Product, products
from encore.rewrite.queries import device_of

aten = torch.ops.aten


def apply(graph: Graph, judge: Judge, chunk: int) -> Graph:
    """The graph with chains of accumulated products taken `chunk` links at a time."""
    editor = Editor(graph)
    for chain in _chains(graph):
        for start in range(0, len(chain), chunk):
            part = chain[start : start + chunk]
            if len(part) == chunk and judge.stacking_gradients_pays(graph, part):
                _stack(editor, part)
    return editor.finish()


def _chains(graph: Graph) -> list[list[Product]]:
    """Products whose sum is passed from one to the next, all with the transpose of a matrix on their left."""
    chains: list[list[Product]] = []
    continued: dict[int, list[Product]] = {}
    for found in products(graph):
        if found.op.forward or not _transposed(graph, found):
            continue
        chain = continued.pop(found.bias, None) if found.bias is not None else None
        if chain is None or not _alike(graph, chain[-1], found):
            chain = []
            chains.append(chain)
        chain.append(found)
        if len(graph.values[found.result].readers) == 1:
            continued[found.result] = chain
    return chains


def _transposed(graph: Graph, found: Product) -> bool:
    maker = graph.producer(found.left)
    return maker is not None and maker.target is aten.t.default


def _alike(graph: Graph, one: Product, other: Product) -> bool:
    values = graph.values
    return all(
        values[mine].shape == values[its].shape and values[mine].dtype == values[its].dtype
        for mine, its in ((one.left, other.left), (one.right, other.right))
    )


def _stack(editor: Editor, part: Sequence[Product]) -> None:
    graph = editor.graph
    first, last = part[0], part[-1]
    name = last.op.name
    stacked = []
    turned_rows = [maker.reads[0] for link in part if (maker := graph.producer(link.left)) is not None]
    for side, operands in (("left", turned_rows), ("right", [link.right for link in part])):
        value = graph.values[operands[0]]
        assert value.dtype is not None
        rows, columns = value.shape
        stack = editor.op_after(
            graph.ops[last.op.id], f"{name}_{side}", aten.cat.default, ([Ref(operand) for operand in operands],)
        )
        stacked.append(editor.result(stack, (len(part) * rows, columns), value.dtype, device_of(graph, operands[0])))
    left = graph.values[stacked[0]]
    turn = editor.op_after(graph.ops[last.op.id], f"{name}_t", aten.t.default, (Ref(stacked[0]),))
    turned = editor.view_result(turn, stacked[0], left.shape[::-1], left.stride[::-1], 0)
    bias = () if first.bias is None else (Ref(first.bias),)
    matmul = editor.op_after(
        graph.ops[last.op.id], f"{name}_stacked", first.op.target, (*bias, Ref(turned), Ref(stacked[1]))
    )
    for link in part[:-1]:
        editor.remove(graph.ops[link.op.id])
    editor.adopt(matmul, last.result)
