"""What no strategy may drop, whatever it would save: values that cannot be made again, or not the same.

Random draws, writes, messages between processes and unknown operators happen once. What the caller gets is kept by the
caller. And an operator can only run again while its operands are what they were: new contents of inputs and buffers
are copied over the old ones when forward returns, before backward runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from encore.graph import Graph, Op, OpClass, Value
from encore.graph.ops import SIDE_EFFECTS
from encore.graph.values import Ref

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
BATCH_NORM_STATISTICS = (3, 4)
"""Where it takes the running statistics, and where it returns the new ones."""
BATCH_NORM_TRAINS = 5


def droppable_values(graph: Graph, operands: Mapping[int, tuple[int, ...]]) -> frozenset[int]:
    """Values made by operators that can run again. `operands` are, by operator, the owners it reads through views."""
    changing = _written_storages(graph) | _overwritten_storages(graph)
    not_ours = graph.external | changing
    leaving = {value for value in (*graph.outputs, *graph.gradients) if value is not None}
    results = (value for op in operands for value in graph.ops[op].writes if value is not None)
    owners = Counter(graph.values[value].storage for value in results)
    found: list[int] = []
    for number, reads in operands.items():
        op = graph.ops[number]
        unread = _read_in_vain(op)
        if op.kind in SIDE_EFFECTS or any(
            graph.values[read].storage in changing for read in reads if read not in unread
        ):
            continue
        for value in op.writes:
            if value is None or value in leaving:
                continue
            storage = graph.values[value].storage
            if storage is not None and storage not in not_ours and owners[storage] == 1:
                found.append(value)
    return frozenset(found)


def _written_storages(graph: Graph) -> set[int]:
    """Storages that operators of the graph write to after they were made."""
    writers = (op for op in graph.ops if op.kind is OpClass.MUTATING)
    return {storage for op in writers for value in op.reads if (storage := graph.values[value].storage) is not None}


def _overwritten_storages(graph: Graph) -> set[int]:
    """Storages of inputs and buffers that get new contents when forward returns.

    The graph says what is copied, not where to. A batch norm's statistics go back where it took them; for the rest,
    any input of the same shape and type may be the one.
    """
    copied = Counter(value for value in graph.outputs if value is not None) - Counter(graph.returned)
    primals = [graph.values[value] for value in graph.primals]
    found: set[int] = set()
    for number in copied:
        value = graph.values[_statistics_at_first(graph, number)]
        candidates = [value] if value.role is not None else [primal for primal in primals if _alike(primal, value)]
        found.update(candidate.storage for candidate in candidates if candidate.storage is not None)
    return found


def _statistics_at_first(graph: Graph, value: int) -> int:
    """The running statistics that a batch norm, or one after the other, made this from; or the value itself."""
    producer = graph.producer(value)
    while producer is not None and producer.target is BATCH_NORM:
        position = producer.writes.index(value)
        if position not in BATCH_NORM_STATISTICS or not isinstance(producer.args[position], Ref):
            break
        value = producer.args[position].value
        producer = graph.producer(value)
    return value


def _read_in_vain(op: Op) -> tuple[int, ...]:
    """Operands that have no say in the results backward needs: statistics, where the batch has its own."""
    if op.target is not BATCH_NORM or not op.args[BATCH_NORM_TRAINS]:
        return ()
    statistics: list[Any] = [op.args[position] for position in BATCH_NORM_STATISTICS]
    return tuple(operand.value for operand in statistics if isinstance(operand, Ref))


def _alike(one: Value, other: Value) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
