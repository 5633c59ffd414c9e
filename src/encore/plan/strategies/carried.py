"""State that a loop carries from one time step to the next, such as the cell of an LSTM.

Recomputed, it needs the state before it, and that the one before, back to the first step: the matrix products that
would bound the walk are next to it, not on it. Echo keeps such state, and so bounds what it recomputes.

A graph has no loops left, but it shows where they were. Time moves on to a new *lap* where a heavy operator runs that
has run in this lap already: the same operator, for the same module, at the same line. If the result of a cheap operator
is read in a later lap, and goes from there, through cheap operators alone, into an operator at the same place of the
source again, it is carried. The blocks of a ResNet or a Transformer are modules of their own and make no laps.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from encore.graph import Op, OpClass
from encore.plan.strategies.forward import Forward

Place = Hashable


def carried_state(forward: Forward, cheap: Collection[int]) -> frozenset[int]:
    """Of the cheap operators, those whose result is carried from lap to lap."""
    lap = _laps(forward)
    if not any(lap.values()):
        return frozenset()
    ops = forward.graph.ops
    edges = [
        (op, reader)
        for op in cheap
        for value in forward.results(op)
        for reader in forward.readers.get(value, ())
        if reader in cheap
    ]
    leads_to: dict[Place, dict[Place, None]] = {_place(ops[op]): {} for op in sorted(cheap)}
    for op, reader in edges:
        leads_to[_place(ops[op])][_place(ops[reader])] = None
    loop = _loops(leads_to)
    return frozenset(
        op for op, reader in edges if lap[op] < lap[reader] and loop[_place(ops[op])] == loop[_place(ops[reader])]
    )


def _place(op: Op) -> Place:
    return op.target, op.module, op.source


def _laps(forward: Forward) -> dict[int, int]:
    """For each operator, how many laps were complete when it ran."""
    lap, run = 0, set[Place]()
    laps: dict[int, int] = {}
    for op in forward.ops:
        if op.kind is OpClass.HEAVY:
            if _place(op) in run:
                lap += 1
                run.clear()
            run.add(_place(op))
        laps[op.id] = lap
    return laps


def _loops(leads_to: Mapping[Place, Collection[Place]]) -> dict[Place, int]:
    """A number for each place, equal for places that lead to each other (Kosaraju: strongly connected components)."""
    comes_from: dict[Place, list[Place]] = {place: [] for place in leads_to}
    for place, followers in leads_to.items():
        for follower in followers:
            comes_from[follower].append(place)
    number: dict[Place, int] = {}
    for place in reversed(_finishing_order(leads_to)):
        pending = [place]
        loop = len(number)
        while pending:
            current = pending.pop()
            if current not in number:
                number[current] = loop
                pending.extend(comes_from[current])
    return number


def _finishing_order(leads_to: Mapping[Place, Collection[Place]]) -> list[Place]:
    """Places in the order in which a depth-first walk is done with them."""
    order: list[Place] = []
    seen: set[Place] = set()
    for root in leads_to:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(leads_to[root]))]
        while path:
            place, followers = path[-1]
            for follower in followers:
                if follower not in seen:
                    seen.add(follower)
                    path.append((follower, iter(leads_to[follower])))
                    break
            else:
                order.append(place)
                path.pop()
    return order
