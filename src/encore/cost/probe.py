"""Run one operator of a graph by itself, on made-up tensors of the right shapes, and ask the allocator about it."""

from __future__ import annotations

from typing import Any

import torch

from encore.cost.measure import measure_cpu, measure_cuda
from encore.graph import Graph, Op
from encore.graph.values import Value, map_refs
from encore.lower.calls import callable_for


def probe_workspace(graph: Graph, op: Op) -> int:
    """Bytes the operator had allocated at its worst moment beyond what its results hold in the end."""
    generators: dict[str, torch.Generator] = {}
    operands: dict[int, Any] = {}

    def operand(index: int) -> Any:
        if index not in operands:
            value = graph.values[index]
            assert value.storage is not None
            device = graph.storages[value.storage].device
            generator = generators.setdefault(device, torch.Generator(device))
            operands[index] = made_up(value, device, generator)
        return operands[index]

    args = map_refs(op.args, operand)
    kwargs = map_refs(op.kwargs, operand)
    measure = measure_cuda if any(device.startswith("cuda") for device in generators) else measure_cpu
    with torch.no_grad():
        measured = measure(lambda: callable_for(op.target)(*args, **kwargs))
    return measured.step_peak - measured.left


def made_up(value: Value, device: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor with the shape, strides and type of a value: noise for floats, zeros for indices."""
    assert value.dtype is not None
    if 0 in value.stride:
        return torch.zeros((), dtype=value.dtype, device=device).expand(value.shape)
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    return tensor.normal_(generator=generator) if value.dtype.is_floating_point else tensor.zero_()
