"""Boundaries of repeated blocks: keep what passes from block to block, recompute the inside.

The layers of a ResNet or a Transformer and the steps of an unrolled loop are the same operators over and over. Between
two of them little is alive: the residual stream, or the state, and whatever all of them read. That is where a
checkpoint is cheapest, and where people put one by hand (`torch.utils.checkpoint` around a block).

A block is found as a *tandem repeat*: a stretch of forward that equals itself shifted by one period, operators, shapes
and module paths (with numbers masked) alike. Longer stretches come first, so that the layers of a network win over
two similar convolutions inside one of them. Of the positions in a period, the one that the fewest bytes cross is the
boundary.

Shortcomings: blocks that differ in a shape (a stage of a ResNet begins with one) are no repeats, and lie between the
boundaries of their neighbours; blocks are cut at one place, even where a second, as narrow, would halve the segment.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from encore.graph import Graph, Op
from encore.plan.strategies.chen_segments import drop_between
from encore.plan.strategies.forward import Forward

SHORTEST_PERIOD = 2
LONGEST_PERIOD = 1024
"""Operators in a block. The bound keeps the search linear in the length of the graph."""

NUMBERS = re.compile(r"\d+")


def blocks(graph: Graph, every: int = 1) -> frozenset[int]:
    """Values that backward recomputes if only what crosses every n-th boundary is kept."""
    forward = Forward.of(graph)
    return drop_between(forward, boundaries_of(forward)[every - 1 :: every])


def block_boundaries(graph: Graph) -> list[int]:
    """Positions in forward's operators (without views) before which a new block begins."""
    return boundaries_of(Forward.of(graph))


def boundaries_of(forward: Forward) -> list[int]:
    crossing = crossing_bytes(forward)
    found: set[int] = set()
    for run in longest_runs(structure(forward)):
        places = np.arange(run.begin, run.begin + run.length // run.period * run.period).reshape(-1, run.period)
        first = run.begin + _narrowest(crossing[places].sum(axis=0))
        found.update(range(first, run.begin + run.length + 1, run.period))
    return sorted(found - {0, len(forward.ops)})


def _narrowest(widths: np.ndarray) -> int:
    """Where the fewest bytes cross. If that is so for several positions in a row, the last of them: nothing is left
    to run between the kept value and the block that reads it."""
    narrow = widths == widths.min()
    ends = np.flatnonzero(narrow & ~np.roll(narrow, -1))
    return int(ends[0]) if len(ends) else 0


def crossing_bytes(forward: Forward) -> np.ndarray:
    """For each position: bytes of values that operators before it make and operators from it on read."""
    place = {op.id: position for position, op in enumerate(forward.ops)}
    steps = np.zeros(len(forward.ops) + 2, dtype=np.int64)
    for op in forward.ops:
        for value in forward.results(op.id):
            if value in forward.readers:
                steps[place[op.id] + 1] += forward.bytes(value)
                steps[place[forward.readers[value][-1]] + 1] -= forward.bytes(value)
    return np.cumsum(steps)


def structure(forward: Forward) -> np.ndarray:
    """Forward as numbers, equal where operators are alike."""
    names: dict[Hashable, int] = {}
    return np.array([names.setdefault(_likeness(forward, op), len(names)) for op in forward.ops], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Repetition:
    """A stretch of forward in which each operator is like the one a period before."""

    begin: int
    length: int
    period: int


def longest_runs(likeness: np.ndarray) -> list[Repetition]:
    """Stretches of at least two periods that do not overlap, the longest first and of equal ones the finest.

    What is shorter than one period of the longest is not a row of blocks, but something inside of one.
    """
    taken = np.zeros(len(likeness), dtype=bool)
    found: list[Repetition] = []
    for run in sorted(_runs(likeness), key=lambda run: (-run.length, run.period, run.begin)):
        free = np.flatnonzero(~taken[run.begin : run.begin + run.length])
        at_least = max(2 * run.period, found[0].period if found else 0)
        if len(free) < at_least or free[-1] - free[0] + 1 != len(free):
            continue
        rest = Repetition(run.begin + int(free[0]), len(free), run.period)
        taken[rest.begin : rest.begin + rest.length] = True
        found.append(rest)
    return found


def _runs(likeness: np.ndarray) -> Iterator[Repetition]:
    for period in range(SHORTEST_PERIOD, min(LONGEST_PERIOD, len(likeness) // 2) + 1):
        alike = np.concatenate(([False], likeness[:-period] == likeness[period:], [False]))
        begins, ends = np.flatnonzero(alike[1:] != alike[:-1]).reshape(-1, 2).T
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if end - begin >= period:
                yield Repetition(begin, end - begin + period, period)


def _likeness(forward: Forward, op: Op) -> Hashable:
    shapes = tuple(forward.graph.values[value].shape for value in forward.results(op.id))
    return op.target, shapes, NUMBERS.sub("#", op.module)
