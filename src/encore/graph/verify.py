"""What a legal graph is. Runs between passes in tests, and once per capture.

1. Ids are positions. 2. Operators read only what exists before them. 3. Every value is written once, or comes from
outside. 4. `reads`, `readers` and the arguments agree. 5. A storage knows its values and is at least as large as
they are. 6. Forward never waits for a tangent. 7. Outputs are computed in forward, gradients exist.
"""

from __future__ import annotations

from encore.errors import IllegalGraphError
from encore.graph.values import Graph, Role, refs, span_bytes


def verify_graph(graph: Graph) -> None:
    """Raise `IllegalGraphError` naming the first rule the graph breaks."""
    _verify_numbering(graph)
    _verify_definitions(graph)
    _verify_storages(graph)
    _verify_phases(graph)


def _demand(holds: bool, rule: str) -> None:
    if not holds:
        raise IllegalGraphError(f"illegal graph: {rule}")


def _verify_numbering(graph: Graph) -> None:
    numbered: dict[str, list[int]] = {
        "value": [value.id for value in graph.values],
        "storage": [storage.id for storage in graph.storages],
        "op": [op.id for op in graph.ops],
    }
    for kind, ids in numbered.items():
        for position, number in enumerate(ids):
            _demand(number == position, f"{kind} {number} stands at position {position}")


def _verify_definitions(graph: Graph) -> None:
    defined = {value.id for value in graph.values if value.role is not None}
    for value in graph.values:
        _demand(value.role is None or value.producer is None, f"{value.name} comes from outside and is written too")
    for op in graph.ops:
        for read in op.reads:
            _demand(read in defined, f"{op.name} reads {graph.values[read].name} before it is written")
            _demand(op.id in graph.values[read].readers, f"{op.name} is missing among the readers of value {read}")
        _demand(set(refs((op.args, op.kwargs))) == set(op.reads), f"{op.name} reads other values than its arguments")
        for written in op.writes:
            if written is None:
                continue
            _demand(written not in defined, f"{graph.values[written].name} is written twice")
            _demand(graph.values[written].producer == op.id, f"{op.name} writes a value of another operator")
            defined.add(written)
    for leaving in (*graph.outputs, *graph.gradients):
        _demand(leaving is None or leaving in defined, f"value {leaving} leaves the graph but was never written")


def _verify_storages(graph: Graph) -> None:
    for storage in graph.storages:
        for claimed in storage.values:
            _demand(
                graph.values[claimed].storage == storage.id, f"storage {storage.id} claims a foreign value {claimed}"
            )
    for value in graph.values:
        if value.storage is not None:
            storage = graph.storages[value.storage]
            _demand(value.id in storage.values, f"{value.name} is missing in its storage")
            _demand(span_bytes(value) <= storage.bytes, f"{value.name} is larger than its storage")


def _verify_phases(graph: Graph) -> None:
    tangents = {value.id for value in graph.values if value.role is Role.TANGENT}
    for op in graph.ops:
        if not op.forward:
            continue
        for value in op.reads:
            producer = graph.producer(value)
            _demand(value not in tangents, f"forward operator {op.name} waits for a tangent")
            _demand(producer is None or producer.forward, f"forward operator {op.name} reads a backward value")
    for output in graph.outputs:
        producer = None if output is None else graph.producer(output)
        _demand(producer is None or producer.forward, f"output {output} is computed in backward")
