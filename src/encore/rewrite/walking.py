"""Walks along a graph on which something is expected at every step; the first thing that differs ends them."""

from __future__ import annotations

from collections.abc import Collection

from encore.graph import Graph, Op, OpClass
from encore.rewrite.queries import readers_of


class NoMatchError(Exception):
    """The graph is not what a walk along it expects."""


def expect(condition: bool) -> None:
    if not condition:
        raise NoMatchError


def views_and_readers(graph: Graph, number: int, leaving: Collection[int]) -> tuple[list[int], list[Op]]:
    """A value with all its views, none of which may leave the graph, and the other operators that read any of them."""
    views, readers = [number], []
    for value in views:
        expect(value not in leaving)
        for reader in readers_of(graph, value):
            if reader.kind is OpClass.VIEW:
                expect(not reader.returns_tuple)
                views += [result for result in reader.writes if result is not None]
            elif reader not in readers:
                readers.append(reader)
    return views, readers
