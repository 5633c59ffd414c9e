"""Products with the same left side become one product with their right sides laid next to each other.

Queries, keys and values written as three layers; in backward, the gradients of a recurrent step's input and state. The
weights are laid side by side once a step, so weights that many products share gain most. Results become windows
of one matrix; a sibling whose readers could not read such a window stays out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encore.graph import Graph, OpClass
from encore.graph.editor import Editor
from encore.graph.ops import is_fusible
from encore.graph.values import Ref
from encore.rewrite.judge import Judge
from encore.rewrite.matmuls import PRODUCTS, Product, products
from encore.rewrite.queries import device_of, exported, has_memory_to_itself

aten = torch.ops.aten


def apply(graph: Graph, judge: Judge) -> Graph:
    """The graph with sibling products merged where that pays."""
    leaving = exported(graph)
    families: dict[tuple[int, bool], list[Product]] = {}
    for found in products(graph):
        if found.bias is None and found.result not in leaving and _windows_will_do(graph, found):
            families.setdefault((found.left, found.op.forward), []).append(found)
    repeated: dict[tuple[int, ...], list[list[Product]]] = {}
    for siblings in families.values():
        weights = tuple(sibling.right for sibling in siblings)
        if len(set(weights)) > 1 and all(_is_given(graph, weight) for weight in weights):
            repeated.setdefault(weights, []).append(siblings)
    editor = Editor(graph)
    for weights, occurrences in repeated.items():
        if judge.merging_pays(graph, occurrences[0], len(occurrences)):
            _merge(editor, weights, occurrences)
    return editor.finish()


def _is_given(graph: Graph, weight: int) -> bool:
    """Return whether it exists before the step, or is a view of what does."""
    value = graph.values[weight]
    return value.storage in graph.external


def _windows_will_do(graph: Graph, found: Product) -> bool:
    """Return whether all readers of the result can read a window of a wider matrix."""
    readers = [graph.ops[reader] for reader in graph.values[found.result].readers]
    return has_memory_to_itself(graph, found.result) and all(
        reader.target in PRODUCTS or (reader.kind is OpClass.CHEAP and is_fusible(reader.target)) for reader in readers
    )


def _merge(editor: Editor, weights: Sequence[int], occurrences: Sequence[Sequence[Product]]) -> None:
    graph = editor.graph
    first = occurrences[0][0]
    widths = [graph.values[weight].shape[1] for weight in weights]
    dtype, device = graph.values[first.result].dtype, device_of(graph, first.result)
    assert dtype is not None
    inner = graph.values[first.right].shape[0]
    lay = editor.op_before(
        graph.ops[first.op.id], f"{first.op.name}_weights", aten.cat.default, ([Ref(w) for w in weights], 1)
    )
    side_by_side = editor.result(lay, (inner, sum(widths)), dtype, device)
    for siblings in occurrences:
        rows = graph.values[siblings[0].left].shape[0]
        last = graph.ops[siblings[0].op.id]
        matmul = editor.op_after(
            last, f"{last.name}_merged", aten.mm.default, (Ref(siblings[0].left), Ref(side_by_side))
        )
        merged = editor.result(matmul, (rows, sum(widths)), dtype, device)
        split = editor.op_after(matmul, f"{last.name}_split", aten.split_with_sizes.default, (Ref(merged), widths, 1))
        split.returns_tuple = True
        offset = 0
        for sibling, width in zip(siblings, widths, strict=True):
            editor.move_into(sibling.result, merged, offset)
            graph.values[sibling.result].stride = (sum(widths), 1)
            editor.adopt(split, sibling.result)
            offset += width
