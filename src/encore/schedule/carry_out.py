"""From a choice to the graph of a step that carries it out."""

from __future__ import annotations

from encore.graph import Graph
from encore.schedule.choice import Choice
from encore.schedule.recompute import recompute
from encore.schedule.stash import keep_less


def carry_out(graph: Graph, choice: Choice, *, exact: bool) -> Graph:
    """The graph in which nothing of the choice is kept as it is. `exact` asks for the very bits that forward made."""
    less = keep_less(graph, choice.stash)
    return recompute(less, choice.recompute, exact=exact, encode=choice.encode, offload=choice.offload)
