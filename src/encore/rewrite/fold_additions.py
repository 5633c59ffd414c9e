"""`x + a @ b` -> `addmm(x, a, b)`, written over `x`: one pass over memory less, and no memory for `a @ b` next to `x`.

The gradient of a weight that T time steps share is a sum of T products: T additions the size of the weight, gone.
Folded only where `x` is read nowhere else, so that its memory can be taken; otherwise the library would copy it.
"""

from __future__ import annotations

import torch

from encore.graph import Graph
from encore.graph.values import Ref, is_contiguous
from encore.rewrite.matching import AnyTensor, Match, OpPattern
from encore.rewrite.op_builder import OpBuilder
from encore.rewrite.queries import has_memory_to_itself, result_of
from encore.rewrite.rules import Rule, apply_rules

aten = torch.ops.aten
WITH_ADDITION = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}


def apply(graph: Graph) -> Graph:
    """The graph with additions folded into products."""
    return apply_rules(graph, RULES)


def _can_write_over_addend(match: Match) -> bool:
    """Of two products, the later one takes the other as its addend."""
    addend, product = match.value("addend"), match.graph.values[result_of(match["product"])]
    maker = match.graph.producer(addend.id)
    if maker is None or not maker.forward == match["product"].forward == match.op.forward:
        return False
    if addend is product or (maker.target in WITH_ADDITION and maker.id > match["product"].id):
        return False
    alike = (
        addend is not product
        and addend.shape == product.shape
        and addend.dtype == product.dtype
        and is_contiguous(addend)
    )
    return alike and match.scope.is_read_once(addend.id) and has_memory_to_itself(match.graph, addend.id)


def _fold(builder: OpBuilder, match: Match) -> None:
    editor, product = builder.editor, match["product"]
    maker = match.graph.producer(match["addend"])
    assert maker is not None
    later = max(maker, product, key=editor.place_of)
    fused = editor.op_after(later, match.op.name, WITH_ADDITION[product.target], (Ref(match["addend"]), *product.args))
    editor.adopt(fused, result_of(match.op))
    editor.remove(product)


PRODUCT = OpPattern(tuple(WITH_ADDITION), ..., name="product", only_use=True)
RULES = (Rule(OpPattern(aten.add.Tensor, PRODUCT, AnyTensor("addend"), commutes=True), _fold, _can_write_over_addend),)
