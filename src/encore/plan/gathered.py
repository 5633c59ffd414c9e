"""Weights that are only there while they are used: FSDP2 frees their memory after forward and gathers them again before
backward.

What forward makes of such weights alone (a cast, a transposed or packed copy) is as large as they are, and saving it
would undo what sharding frees. So backward makes it again, from the weights as they are then.
"""

from __future__ import annotations

from encore.fates import Recompute, recomputable
from encore.graph import Graph, OpClass, Role
from encore.schedule import carry_out_fates


def made_of_parameters(graph: Graph) -> frozenset[int]:
    """The values of forward that depend on parameters and nothing else, in memory of their own, which backward can
    make again."""
    derived = {value for value in graph.primals if graph.values[value].role is Role.PARAMETER}
    made: set[int] = set()
    for op in graph.ops:
        if op.forward and op.reads and op.kind is not OpClass.RANDOM and derived.issuperset(op.reads):
            results = {value for value in op.writes if value is not None}
            derived |= results
            made |= results
    return frozenset(made & recomputable(graph))


def remade(graph: Graph) -> frozenset[Recompute]:
    """The fates by which nothing that is made of parameters alone is saved."""
    return frozenset(map(Recompute, made_of_parameters(graph)))


def without_saved_weights(graph: Graph, *, exact: bool) -> Graph:
    """The graph in which backward makes what it reads of parameters alone."""
    fates = remade(graph)
    return carry_out_fates(graph, fates, exact=exact).graph if fates else graph
