"""What several passes ask about a value: where it is stored, what reads it, whether it leaves the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encore.graph import Graph, Op
from encore.graph.values import Value


def exported(graph: Graph) -> set[int]:
    """Values that leave the graph."""
    return {value for value in (*graph.outputs, *graph.gradients) if value is not None}


def device_of(graph: Graph, value: int) -> str:
    storage = graph.values[value].storage
    assert storage is not None
    return graph.storages[storage].device


def dtype_of(graph: Graph, value: int) -> torch.dtype:
    dtype = graph.values[value].dtype
    assert dtype is not None
    return dtype


def result_of(op: Op) -> int:
    """The only result of an operator."""
    (result,) = op.writes
    assert result is not None
    return result


def readers_of(graph: Graph, value: int) -> list[Op]:
    return [graph.ops[reader] for reader in graph.values[value].readers]


def has_memory_to_itself(graph: Graph, value: int) -> bool:
    """Return whether no other value shares the value's memory, and the step allocated it."""
    storage = graph.values[value].storage
    if storage is None or storage in graph.external:
        return False
    return graph.storages[storage].values == [value] and graph.values[value].producer is not None


def replaced_storages(graph: Graph) -> set[int | None]:
    """Storages whose contents the step replaces: backward reads other numbers there than forward."""
    return {graph.values[number].storage for number in graph.mutated}


def represents(value: Value, number: float) -> bool:
    """Return whether a constant is the same in the type of a value as in float32, in which formulas compare."""
    assert value.dtype is not None
    return value.dtype.itemsize > 2 or float(torch.tensor(number, dtype=value.dtype)) == number


def same_elements(one: Value, two: Value, *, transposed: bool = False) -> bool:
    """Return whether two values look at the same elements in the same order, or one of them at the other's matrices
    transposed."""
    shape, stride = two.shape, two.stride
    if transposed:
        shape, stride = (*shape[:-2], *shape[:-3:-1]), (*stride[:-2], *stride[:-3:-1])
    where = (one.storage, one.offset, one.shape) == (two.storage, two.offset, shape)
    return where and effective_strides(one.shape, one.stride) == effective_strides(shape, stride)


def effective_strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides of dimensions with more than one element."""
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]
