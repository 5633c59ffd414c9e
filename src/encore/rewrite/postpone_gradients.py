"""A weight's gradient that is far larger than what it is made of is made at the end of backward; lossless, and as fast.

All gradients are there when backward ends, whatever the order. Until then one that has not been made takes only the
room of its operands. A classifier's wide layers (a batch of rows into millions of weights) come first in backward: made
at once, their gradients are kept next to the large activations of everything below them, which is where AlexNet and
OverFeat peak. Where a batch has as many rows as a layer has units, there is nothing to gain, and nothing is moved.
"""

from __future__ import annotations

from encore.graph import Graph, Op, OpClass
from encore.graph.editor import Editor

FEW = 1 << 20
"""Bytes of a gradient that is made where it always was."""
TIMES = 4
"""A gradient is postponed that takes so many times the bytes that are kept for it meanwhile."""
MOVABLE = frozenset({OpClass.VIEW, OpClass.CHEAP, OpClass.HEAVY})


def apply(graph: Graph) -> Graph:
    """The graph with such gradients made last, in the order in which they were made."""
    editor = Editor(graph)
    last: list[Op] = []
    staying = {graph.values[value].storage for value in graph.gradients if value is not None} | graph.external
    staying |= {None}
    written_to = {graph.values[read].storage for op in graph.ops if op.kind is OpClass.MUTATING for read in op.reads}
    for gradient in graph.gradients:
        if gradient is None or graph.bytes_of(gradient) < FEW:
            continue
        makers = _makers(graph, gradient)
        made = {value for op in makers for value in op.writes}
        operands = {graph.values[read].storage for op in makers for read in op.reads if read not in made}
        held = operands - staying
        waiting = sum(graph.storages[storage].bytes for storage in held if storage is not None)
        if makers and not operands & written_to and TIMES * waiting <= graph.bytes_of(gradient):
            staying |= held  # another gradient that is made of the same costs no more
            last += makers
    last.sort(key=lambda op: op.id)
    if [op.id for op in last] != [op.id for op in graph.ops[len(graph.ops) - len(last) :]]:
        for op in last:
            editor.place_after(op, graph.ops[-1:])
    return editor.finish()


def _makers(graph: Graph, gradient: int) -> list[Op]:
    """What makes a gradient and is there for nothing else: its matrix product, or several that are added up, the views
    that these take of their operands, and what becomes of the result. Nothing where there is no product, or where one
    of them has other readers."""
    leaving = {value for value in (*graph.outputs, *graph.gradients) if value is not None} - {gradient}
    found: dict[int, Op] = {}
    products = 0
    pending = [(gradient, False)]
    while pending:
        value, beyond = pending.pop()
        op = graph.producer(value)
        if op is None or op.forward or op.id in found or (beyond and op.kind is not OpClass.VIEW):
            continue
        shared = any(
            written in leaving or not all(reader in found for reader in graph.values[written].readers)
            for written in op.writes
            if written is not None
        )
        if shared and beyond:
            continue  # a view that others read as well stays where it is
        if shared or op.kind not in MOVABLE:
            return []
        found[op.id] = op
        products += op.kind is OpClass.HEAVY
        pending += [(read, beyond or op.kind is OpClass.HEAVY) for read in op.reads]
    return [found[number] for number in sorted(found)] if products else []
