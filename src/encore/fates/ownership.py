"""The values of forward whose memory a plan may free: facts that every kind of fate asks for."""

from __future__ import annotations

from collections import Counter

from encore.graph import Graph, OpClass, Value
from encore.graph.values import block_bytes, span_bytes


def owned(graph: Graph) -> frozenset[int]:
    """What forward makes in memory that is its own: not visible outside, never written to again, of one owner."""
    leaving = {graph.values[value].storage for value in (*graph.outputs, *graph.gradients) if value is not None}
    foreign = graph.external | leaving | changing_storages(graph) | {None}
    made = [
        value
        for op in graph.ops
        if op.forward and op.kind is not OpClass.VIEW
        for value in op.writes
        if value is not None
    ]
    owners_of = Counter(graph.values[value].storage for value in made)
    return frozenset(
        value for value in made if (storage := graph.values[value].storage) not in foreign and owners_of[storage] == 1
    )


def owners(graph: Graph, *, forward_only: bool) -> dict[int, int]:
    """For every value that is made, the value whose memory it looks at: itself, or what it is a view of."""
    owner: dict[int, int] = {}
    for op in graph.ops:
        if forward_only and not op.forward:
            continue
        bases = [owner.get(read, read) for read in op.reads] if op.kind is OpClass.VIEW else []
        for value in op.writes:
            if value is not None:
                owner[value] = bases[0] if bases else value
    return owner


def changing_storages(graph: Graph) -> set[int]:
    """Storages whose contents in backward are not those in forward."""
    writers = (op for op in graph.ops if op.kind is OpClass.MUTATING)
    written = (*graph.mutated, *(value for op in writers for value in op.reads))
    return {storage for value in written if (storage := graph.values[value].storage) is not None}


def fills_its_memory(graph: Graph, value: Value) -> bool:
    """Return whether every byte of its storage is an element of it, and only one."""
    assert value.storage is not None
    storage = graph.storages[value.storage]
    return (
        value.offset == 0
        and span_bytes(value) == value.bytes
        and block_bytes(value.bytes, storage.device) == storage.bytes
    )
