"""When the gradients of parameters are final: where a backward can be cut to give them to autograd as it goes on.

A gradient leaves after the last action that reads or writes its memory, and after the last one that reads its
parameter: whoever receives it may write to both, as an optimizer does that steps in backward. Plain PyTorch's nodes
have the second rule built in, since one node computes all gradients that read a weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from encore.graph import Role
from encore.schedule.actions import Action, Free, Fused, Schedule

PARTS = 64
"""Gradients leave together until they are this part of all gradients' bytes: at most so many cuts."""


class Cut(NamedTuple):
    """Gradients that leave in the middle of backward."""

    after: int
    """The position of the last action before it."""
    places: tuple[int, ...]
    """Which of the gradients."""


def gradient_cuts(schedule: Schedule) -> tuple[Cut, ...]:
    """Where backward can be cut, and the gradients of parameters that leave there; the others leave at the end."""
    graph = schedule.graph
    found = sorted((ready, place) for place, ready in _ready(schedule))
    sizes = {place: graph.bytes_of(value) for place, value in enumerate(graph.gradients) if value is not None}
    least = sum(sizes.values()) / PARTS
    cuts: list[Cut] = []
    places: list[int] = []
    for ready, place in found:
        places.append(place)
        if sum(sizes[one] for one in places) >= least:
            cuts.append(Cut(ready, tuple(places)))
            places = []
    if cuts and sum(len(cut.places) for cut in cuts) == len(sizes):
        cuts.pop()  # the end has to have some
    return tuple(cuts)


def last_reads(schedule: Schedule) -> dict[int, int]:
    """By storage: the position of the last action of backward that reads or writes it."""
    graph = schedule.graph
    last: dict[int, int] = {}
    for position, action in enumerate(schedule.backward):
        for value in _touched(schedule, action):
            if (storage := graph.values[value].storage) is not None:
                last[storage] = position
    return last


def _ready(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The place of each gradient that can leave early, and the position after which it can."""
    graph, last = schedule.graph, last_reads(schedule)
    storages = Counter(graph.values[value].storage for value in graph.gradients if value is not None)
    given = {graph.values[value].storage for value in graph.tangents} | graph.external
    tokens = len(graph.primals) - len(graph.gradients)
    for place, value in enumerate(graph.gradients):
        primal = graph.primals[place + tokens] if tokens >= 0 else None
        if value is None or primal is None or primal not in graph.leaves:
            continue
        storage, held = graph.values[value].storage, graph.values[primal].storage
        of_parameter = graph.values[primal].role is Role.PARAMETER
        if not of_parameter or storage is None or held is None or storage in given or storages[storage] > 1:
            continue
        yield place, max(last.get(storage, -1), last.get(held, -1))


def _touched(schedule: Schedule, action: Action) -> Iterator[int]:
    if isinstance(action, Free):
        return
    if isinstance(action, Fused):
        yield from action.reads
        yield from action.writes
        return
    op = schedule.graph.ops[action.op]
    yield from op.reads
    yield from (value for value in op.writes if value is not None)
