"""Backward of a pooling layer is given the size of the layer's input instead of keeping it; lossless, and as fast."""

from __future__ import annotations

from encore.graph import Graph
from encore.graph.needs import Need, need_of
from encore.graph.sized_ops import SIZE, SIZED
from encore.rewrite.matching import AnyTensor, Match, OpPattern
from encore.rewrite.op_builder import OpBuilder
from encore.rewrite.queries import result_of
from encore.rewrite.rules import Rule, apply_rules


def apply(graph: Graph) -> Graph:
    """The graph with such backward operators where nothing else in backward needs the numbers of the input."""
    return apply_rules(graph, RULES)


def _needs_the_size_alone(match: Match) -> bool:
    source, needs = match.value("input"), match.scope.needs
    if source.storage not in needs.of or needs.is_kept_whole(source.storage):
        return False
    same_type = match.graph.values[result_of(match.op)].dtype == source.dtype
    return same_type and need_of(match.op, source.id) is Need.SIZE


def _give_size(builder: OpBuilder, match: Match) -> None:
    op, result = match.op, match.graph.values[result_of(match.op)]
    args = (op.args[0], list(result.shape), list(result.stride), *op.args[SIZE + 1 :])
    builder.replace(op, SIZED[op.target], args)


RULES = (
    Rule(
        OpPattern(tuple(SIZED), AnyTensor("gradient"), AnyTensor("input"), ..., forward=False),
        _give_size,
        _needs_the_size_alone,
    ),
)
