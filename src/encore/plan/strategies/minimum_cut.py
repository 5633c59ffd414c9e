"""Min-cut: the fewest bytes from which cheap operators can make all that backward needs.

This is how PyTorch's own partitioner decides (`min_cut_rematerialization_partition`, He 2022), as a maximum-flow
problem: every value is an edge as wide as its bytes, operands lead to results, what cannot be recomputed hangs on the
source and what backward needs on the sink. The edges of the smallest cut are kept; behind it everything is recomputed.
Optimal in bytes kept, given that heavy operators never run twice, where Echo is greedy.

Shortcomings: bytes kept are not the peak; no price is put on time, so a long chain is recomputed to save a byte.
PyTorch adds rules of thumb for that (what is not fused, or read far away, is not recomputed), which are left out here:
the planner weighs time itself. Of several smallest cuts the one closest to backward is taken, which runs least again.
"""

from __future__ import annotations

from encore.graph import Graph, OpClass
from encore.plan.strategies.forward import Forward
from encore.plan.strategies.max_flow import Network


def min_cut(graph: Graph) -> frozenset[int]:
    """Values that backward recomputes."""
    forward = Forward.of(graph)
    again = recomputable_values(forward)
    return forward.recomputed(again - smallest_cut(forward, again))


def recomputable_values(forward: Forward) -> frozenset[int]:
    """Results of cheap operators that may run again."""
    ops = forward.graph.ops
    cheap = (op.id for op in forward.ops if op.kind is OpClass.CHEAP)
    return frozenset(value for op in cheap for value in ops[op].writes if value in forward.droppable)


def smallest_cut(forward: Forward, again: frozenset[int]) -> set[int]:
    """The values to keep, among those in `again` and those that are not."""
    network = Network()
    source, sink = network.node(), network.node()
    values = _values_in_reach(forward, again)
    enter = {value: network.node() if value in again else source for value in values}
    leave = {value: network.node() for value in values}
    unlimited = 1 + sum(forward.bytes(value) for value in values)
    for value in values:
        network.edge(enter[value], leave[value], forward.bytes(value))
        if value in forward.needed:
            network.edge(leave[value], sink, unlimited)
        if value in again:
            for operand in _operands(forward, value):
                network.edge(leave[operand], enter[value], unlimited)
    network.fill(source, sink)
    behind = network.before(sink)
    return {value for value in values if leave[value] in behind and enter[value] not in behind}


def _values_in_reach(forward: Forward, again: frozenset[int]) -> list[int]:
    """What backward needs, and what that could be made from: nothing else can be worth keeping."""
    found = dict.fromkeys(sorted(forward.needed))
    pending = list(found)
    while pending:
        value = pending.pop()
        if value in again:
            new = [operand for operand in _operands(forward, value) if operand not in found]
            found.update(dict.fromkeys(new))
            pending += new
    return list(found)


def _operands(forward: Forward, value: int) -> tuple[int, ...]:
    producer = forward.producer(value)
    assert producer is not None
    return forward.operands[producer]
