"""What recognising a formula in a graph takes, whichever it is: expectations, and views that do not matter.

A match is a walk along the graph on which something is expected at every step; the first thing that is not as expected
ends it, and the formula is something else.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.values import Value


class NoMatchError(Exception):
    """It is something else."""


def expect(condition: bool) -> None:
    if not condition:
        raise NoMatchError


def holds(map_: Value, number: float) -> bool:
    """Is a constant the same in the type of a map as in the one that formulas compare in?"""
    assert map_.dtype is not None
    return map_.dtype.itemsize > 2 or float(torch.tensor(number, dtype=map_.dtype)) == number


def replaced_storages(graph: Graph) -> set[int | None]:
    """Storages whose contents the step replaces: backward finds others there than forward did."""
    return {graph.values[number].storage for number in graph.mutated}


def views_and_readers(graph: Graph, number: int, leaving: Collection[int]) -> tuple[list[int], list[Op]]:
    """A value with all its views, none of which may leave the graph, and whoever reads any of them otherwise."""
    views, readers = [number], []
    for value in views:
        expect(value not in leaving)
        for reader in (graph.ops[place] for place in graph.values[value].readers):
            if reader.kind is OpClass.VIEW:
                expect(not reader.returns_tuple)
                views += [result for result in reader.writes if result is not None]
            elif reader not in readers:
                readers.append(reader)
    return views, readers
