"""The bytes that a step saves for backward if some values are recomputed: an independent computation."""

from __future__ import annotations

import functools
from collections.abc import Collection

from benchmarks.workloads import tiny
from encore.graph import Graph, OpClass
from support.captured_graphs import captured_graph


@functools.cache
def workload_graph(name: str) -> Graph:
    """The graph of a tiny workload; nobody changes it."""
    workload = tiny(name)
    return captured_graph(workload.model, *workload.batch(0))


def backward_asks_for(graph: Graph, dropped: Collection[int] = ()) -> tuple[set[int], set[int]]:
    """Values kept, and values made again, when backward runs with these dropped. What lives outside is left out."""
    kept: set[int] = set()
    again: set[int] = set()
    asked: set[int] = set()
    pending = [value for op in graph.ops if not op.forward for value in op.reads]
    pending += [value for value in graph.gradients if value is not None]
    while pending:
        value = pending.pop()
        producer = graph.producer(value)
        if value in asked or producer is None or not producer.forward:
            continue
        asked.add(value)
        if producer.kind is OpClass.VIEW:
            pending += producer.reads
        elif value in dropped:
            again.add(value)
            pending += producer.reads
        else:
            kept.add(value)
    return kept, again


def kept_bytes(graph: Graph, dropped: Collection[int] = ()) -> int:
    """Bytes of feature maps, each storage once."""
    kept, _ = backward_asks_for(graph, dropped)
    storages = {graph.values[value].storage for value in kept} - graph.external - {None}
    return sum(graph.storages[storage].bytes for storage in storages if storage is not None)


def names(graph: Graph, values: Collection[int]) -> set[str]:
    return {graph.values[value].name for value in values}
