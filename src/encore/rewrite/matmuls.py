"""The matrix products of a graph, and what depends on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from encore.graph import Graph, Op
from encore.graph.values import Ref
from encore.rewrite.queries import result_of

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True, slots=True)
class Product:
    """`left @ right`, plus `bias` where it has one (`addmm`)."""

    op: Op
    bias: int | None
    left: int
    right: int
    result: int


def product(op: Op) -> Product | None:
    """The operator as a product of two matrices, if that is what it is."""
    if op.target not in PRODUCTS or op.kwargs or not all(isinstance(argument, Ref) for argument in op.args):
        return None
    *bias, left, right = (argument.value for argument in op.args)
    result = result_of(op)
    return Product(op, bias[0] if bias else None, left, right, result)


def products(graph: Graph) -> Iterator[Product]:
    return (found for op in graph.ops if (found := product(op)) is not None)


def depends_on(graph: Graph, members: Sequence[Product]) -> set[int]:
    """Every value up to the last of some products that is computed from the result of one of them, directly or not;
    those results too."""
    tainted = {member.result for member in members}
    numbers = [member.op.id for member in members]
    for op in graph.ops[min(numbers) : max(numbers)]:
        if not tainted.isdisjoint(op.reads):
            tainted.update(value for value in op.writes if value is not None)
    return tainted
