"""Values that play the same part in repeated layers or time steps. They are decided together: a translator of thirty
steps has two thousand feature maps and some forty parts to play."""

from __future__ import annotations

import re
from collections.abc import Iterable

from encore.graph import Graph


def by_role(graph: Graph, values: Iterable[int]) -> list[tuple[int, ...]]:
    """The values in groups of one role each, in the order in which forward makes them.

    A role is a place in the source, a module path without its numbers, an operator and a shape.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for value in sorted(values, key=lambda value: (graph.values[value].producer or 0, value)):
        maker = graph.producer(value)
        assert maker is not None
        path = re.sub(r"\d+", "*", maker.module)
        shape = graph.values[value].shape
        key = (path, maker.source, str(maker.target), maker.writes.index(value), shape)
        groups.setdefault(key, []).append(value)
    return [tuple(group) for group in groups.values()]
