"""Which operators may write over an operand that dies there.

Eager PyTorch does this where the user wrote `relu_` and where autograd adds up gradients; AOTAutograd's functional
graph has lost both. A pointwise operator whose operand is read for the last time can take over that operand's memory:
the same numbers, one allocation less, and a cache that is still warm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from encore.graph import Graph, Op, Value
from encore.graph.ops import OUT_VARIANT, WRITES_FIRST
from encore.graph.values import Ref, block_bytes, refs


def write_over_dying(
    graph: Graph, ops: Sequence[Op], last_use: Mapping[int, int], given: frozenset[int], keep: frozenset[int]
) -> dict[int, int]:
    """Position in `ops` -> the operand whose memory the result takes.

    Only memory that these very operators allocated is written over: what was given (inputs, saved values, tangents)
    may be read again by someone else, and what is kept will be.
    """
    over: dict[int, int] = {}
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

    for position, op in enumerate(ops):
        if len(op.writes) != 1 or op.writes[0] is None:
            continue
        result = graph.values[op.writes[0]]
        if result.storage is None:
            continue
        for operand in _candidates(op):
            value = graph.values[operand]
            if value.storage is None or value.storage == result.storage:
                continue
            dies = last_look.get(value.storage) == position and value.storage not in foreign
            shared = [other for other in op.reads if other != operand and holds(other) == holds(operand)]
            if dies and not shared and _same_window(graph, value, result):
                over[position] = operand
                taken[result.storage] = taken.get(value.storage, value.storage)
                break
    return over


def _candidates(op: Op) -> list[int]:
    """Operands this operator knows how to write over."""
    if op.target in OUT_VARIANT:
        return [argument.value for argument in op.args if isinstance(argument, Ref)]
    if op.target in WRITES_FIRST and isinstance(op.args[0], Ref):
        first = op.args[0].value
        mentions = list(refs((op.args, op.kwargs))).count(first)
        return [first] if mentions == 1 else []  # scattering a tensor into itself reads what it has written
    return []


def _same_window(graph: Graph, value: Value, result: Value) -> bool:
    """Does the operand fill its whole storage the way the result will fill its own?"""
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
