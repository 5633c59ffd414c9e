"""Ask a function about an operator's call, on operands that have shapes and strides and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from encore.graph.values import Graph, Op, map_refs


def on_shapes(graph: Graph, op: Op, function: Callable[..., Any]) -> Any:
    """What the function says to the operator's arguments."""

    def operand(index: int) -> torch.Tensor:
        value = graph.values[index]
        assert value.storage is not None
        device = graph.storages[value.storage].device
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)

    with FakeTensorMode():
        return function(*map_refs(op.args, operand))
