"""`x + a @ b` -> `addmm(x, a, b)`, written over `x`: one pass over memory less, and no room for `a @ b` beside `x`.

The gradient of a weight that T time steps share is a sum of T products: T additions the size of the weight, gone.
Folded only where `x` is read nowhere else, so that its memory can be taken; otherwise the library would copy it.
"""

from __future__ import annotations

import torch

from encore.graph import Graph, Op
from encore.graph.editor import Editor
from encore.graph.values import Ref, is_contiguous
from encore.rewrite.matmuls import exported, has_memory_to_itself

aten = torch.ops.aten
WITH_ADDITION = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}


def fold_additions(graph: Graph) -> Graph:
    """The graph with additions folded into products."""
    editor = Editor(graph)
    leaving = exported(graph)
    folded: set[int] = set()
    for op in graph.ops:
        if op.target is not aten.add.Tensor or op.kwargs or len(op.reads) != 2:
            continue
        found = _product_and_addend(graph, op, leaving, folded)
        if found is None:
            continue
        matmul, addend = found
        (result,) = op.writes
        assert result is not None
        made = graph.producer(addend)
        later = matmul if made is None or editor.place_of(made) < editor.place_of(matmul) else made
        fused = editor.op_after(later, op.name, WITH_ADDITION[matmul.target], (Ref(addend), *matmul.args))
        editor.adopt(fused, result)
        editor.remove(matmul)
        folded.add(matmul.id)
    return editor.finish()


def _product_and_addend(graph: Graph, op: Op, leaving: set[int], folded: set[int]) -> tuple[Op, int] | None:
    """The product among the operands of an addition (the later one, if both are), and the other operand."""
    candidates = []
    for product, addend in (op.reads, op.reads[::-1]):
        matmul = graph.producer(product)
        if matmul is None or matmul.target not in WITH_ADDITION or matmul.id in folded:
            continue
        value, other = graph.values[product], graph.values[addend]
        fits = value.shape == other.shape and value.dtype == other.dtype and is_contiguous(other)
        theirs = {product, addend} & leaving or value.readers != [op.id] or other.readers != [op.id]
        same_phase = matmul.forward == op.forward
        if fits and not theirs and same_phase and has_memory_to_itself(graph, addend):
            maker = graph.producer(addend)
            if maker is not None and maker.forward == op.forward:
                candidates.append((matmul, addend))
    return max(candidates, key=lambda found: found[0].id, default=None)
