"""Calls on operands that have shapes and strides, and no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encore.graph.torch_private import FakeTensorMode
from encore.graph.values import Graph, Op, Value, map_refs


@dataclass(frozen=True, slots=True)
class TensorShape:
    """An operand without memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


def shaped_arguments(graph: Graph, op: Op) -> tuple[Any, ...]:
    """The arguments of an operator, with operands as `TensorShape`: equal for calls on equal shapes, and hashable."""

    def operand(index: int) -> TensorShape:
        value = graph.values[index]
        assert value.storage is not None
        assert value.dtype is not None
        return TensorShape(value.shape, value.stride, value.dtype, graph.storages[value.storage].device)

    def hashable(argument: Any) -> Any:
        return tuple(map(hashable, argument)) if isinstance(argument, tuple | list) else argument

    shaped: tuple[Any, ...] = hashable(map_refs(op.args, operand))
    return shaped


def call_on_shapes(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a function with such arguments, as fake tensors. This takes milliseconds."""

    def given(argument: Any) -> Any:
        if isinstance(argument, TensorShape):
            shape = argument
            return torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=shape.device)
        return tuple(map(given, argument)) if isinstance(argument, tuple) else argument

    with FakeTensorMode():
        return function(*map(given, arguments))


def windows(op: Op, base: Value, storage_bytes: int) -> list[torch.Tensor]:
    """The results of a view operator for a tensor like `base`: meta tensors with shapes, strides and offsets."""
    assert base.dtype is not None
    storage = torch.empty(storage_bytes // base.dtype.itemsize, dtype=base.dtype, device="meta")
    seen = storage.as_strided(base.shape, base.stride, base.offset)
    args, kwargs = map_refs((op.args, op.kwargs), lambda _: seen)
    made = op.target(*args, **kwargs)
    return list(made) if op.returns_tuple else [made]
