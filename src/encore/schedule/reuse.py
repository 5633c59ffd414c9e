"""Which operators may write over an operand that dies there.

Eager PyTorch does this where the user wrote `relu_` and where autograd adds up gradients; AOTAutograd's functional
graph has lost both. A pointwise operator whose operand is read for the last time can take over that operand's memory:
the same numbers, one allocation less, and a cache that is still warm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from encore.graph import Graph, Op, Value
from encore.graph.ops import OUT_VARIANT, WRITES_FIRST, is_pointwise
from encore.graph.values import Ref, block_bytes, refs
from encore.schedule.kernel import Group


def write_over_dying(
    graph: Graph,
    items: Sequence[Op | Group],
    last_use: Mapping[int, int],
    given: frozenset[int],
    keep: frozenset[int],
) -> dict[int, list[tuple[int, int]]]:
    """Position in `items` -> pairs of a result and the operand whose memory it takes.

    Only memory that these very operators allocated is written over: what was given (inputs, saved values, tangents)
    may be read again by someone else, and what is kept will be.
    """
    over: dict[int, list[tuple[int, int]]] = {}
    foreign = {graph.values[value].storage for value in (*given, *keep, *graph.constants)}
    last_look: dict[int, int] = {}
    for read, position in last_use.items():
        storage = graph.values[read].storage
        if storage is not None:
            last_look[storage] = max(position, last_look.get(storage, -1))
    taken: dict[int, int] = {}

    def holds(value: int) -> int | None:
        """The storage that really holds the value's bytes, after the take-overs so far."""
        storage = graph.values[value].storage
        return None if storage is None else taken.get(storage, storage)

    for position, item in enumerate(items):
        for written, operands in _candidates(graph, item):
            result = graph.values[written]
            used = {operand for _, operand in over.get(position, ())}
            for operand in operands:
                value = graph.values[operand]
                if operand in used or None in (value.storage, result.storage) or value.storage == result.storage:
                    continue
                assert value.storage is not None
                assert result.storage is not None
                if last_look.get(value.storage) != position or value.storage in foreign:
                    continue  # read later
                shared = any(other != operand and holds(other) == holds(operand) for other in item.reads)
                if not shared and _same_window(graph, value, result):
                    over.setdefault(position, []).append((written, operand))
                    taken[result.storage] = taken.get(value.storage, value.storage)
                    break
    return over


def _candidates(graph: Graph, item: Op | Group) -> list[tuple[int, list[int]]]:
    """Results, each with the operands that may be written over by it."""
    if isinstance(item, Group):
        return _candidates_of_group(graph, item)
    if item.writes[0] is None or (len(item.writes) != 1 and item.target not in WRITES_FIRST):
        return []
    return [(item.writes[0], _operands_written_over(item))]


def _candidates_of_group(graph: Graph, group: Group) -> list[tuple[int, list[int]]]:
    """A kernel reads an element of an operand and writes the same element of a result in one go where all that lies
    between is pointwise."""
    inside = {op.id for op in group.ops}
    readers: dict[int, list[Op]] = {}
    for op in group.ops:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    operands = [value for value in group.reads if all(is_pointwise(reader.target) for reader in readers[value])]
    results = [value for value in group.writes if (producer := graph.producer(value)) and is_pointwise(producer.target)]
    assert all(graph.values[value].producer in inside for value in group.writes)
    return [(result, operands) for result in results]


def _operands_written_over(op: Op) -> list[int]:
    """Operands this operator knows how to write over."""
    if op.target in OUT_VARIANT:
        return [argument.value for argument in op.args if isinstance(argument, Ref)]
    if op.target in WRITES_FIRST and isinstance(op.args[0], Ref):
        first = op.args[0].value
        mentions = list(refs((op.args, op.kwargs))).count(first)
        return [first] if mentions == 1 else []  # scattering a tensor into itself reads what it has written
    return []


def _same_window(graph: Graph, value: Value, result: Value) -> bool:
    """Return whether the operand fills its whole storage as the result will fill its own."""
    assert value.storage is not None
    assert result.storage is not None
    mine, its = graph.storages[value.storage], graph.storages[result.storage]
    return (
        value.shape == result.shape
        and value.stride == result.stride
        and value.dtype == result.dtype
        and mine.device == its.device
        and value.dtype is not None
        and not value.dtype.is_complex  # such a tensor may be read as its conjugate
        and block_bytes(value.bytes, mine.device) == mine.bytes == its.bytes
        and value.bytes > 0
    )
