"""Training deep nets with sublinear memory cost (Chen, Xu, Zhang, Guestrin 2016): segments.

Forward is cut into about sqrt(n) segments of equal length. Only what crosses a cut is kept; backward runs a segment
again, heavy operators and all, before it goes back through it. For a chain of n equal layers this keeps O(sqrt(n))
activations for one more forward, and sqrt(n) is the best number of segments.

Shortcomings: operators are counted, not their bytes or seconds, so a cut falls wherever it falls, in the middle of a
block too, where many tensors cross; matrix products are run again even where something cheaper would do.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from encore.graph import Graph
from encore.plan.strategies.forward import Forward


def chen(graph: Graph, segments: int | None = None) -> frozenset[int]:
    """Values that backward recomputes, with forward cut into `segments` (sqrt(n) of them by default)."""
    forward = Forward.of(graph)
    return drop_between(forward, chen_cuts(len(forward.ops), segments))


def chen_cuts(length: int, segments: int | None = None) -> list[int]:
    """Positions before which a new segment begins."""
    count = max(1, round(math.sqrt(length)) if segments is None else segments)
    return sorted({round(length * number / count) for number in range(1, count)} - {0, length})


def drop_between(forward: Forward, cuts: Sequence[int]) -> frozenset[int]:
    """Everything that no cut separates from its last reader in forward, and that may be dropped.

    The last segment stays as it is: backward begins with it, and would make it again at once.
    """
    place = {op.id: position for position, op in enumerate(forward.ops)}
    inside: set[int] = set()
    for op in forward.ops:
        segment = bisect.bisect_right(cuts, place[op.id])
        if segment == len(cuts):
            break
        for value in forward.results(op.id):
            readers = forward.readers.get(value)
            if value in forward.droppable and (readers is None or place[readers[-1]] < cuts[segment]):
                inside.add(value)
    return forward.recomputed(inside)
