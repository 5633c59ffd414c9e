"""Calls on operands that have shapes and strides, and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from encore.graph.torch_private import FakeTensorMode
from encore.graph.values import Graph, Op, Value, map_refs


def call_on_shapes(graph: Graph, op: Op, function: Callable[..., Any]) -> Any:
    """Call a function with the arguments of an operator, as fake tensors."""

    def operand(index: int) -> torch.Tensor:
        value = graph.values[index]
        assert value.storage is not None
        device = graph.storages[value.storage].device
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)

    with FakeTensorMode():
        return function(*map_refs(op.args, operand))


def windows(op: Op, base: Value, storage_bytes: int) -> list[torch.Tensor]:
    """The results of a view operator for a tensor like `base`: meta tensors with shapes, strides and offsets."""
    assert base.dtype is not None
    storage = torch.empty(storage_bytes // base.dtype.itemsize, dtype=base.dtype, device="meta")
    seen = storage.as_strided(base.shape, base.stride, base.offset)
    args, kwargs = map_refs((op.args, op.kwargs), lambda _: seen)
    made = op.target(*args, **kwargs)
    return list(made) if op.returns_tuple else [made]
