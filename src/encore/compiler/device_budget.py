"""A budget in bytes, or the whole device, as what a GPU runs out of: reserved bytes, cuBLAS's workspaces, the context.

The device is read once nothing is cached, when a graph is planned. Every plan is then judged by the bytes that the
allocator reserves while steps run with it (`plan/footprint.py`). Percentages and the lowest peak speak of allocated
bytes, as on CPUs.

Known shortcoming: of models that FSDP2 shards, no allocator is followed, since the graphs do not say what is gathered,
reduced and freed around them. What may be reserved bounds the bytes that are allocated in their steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from encore.cost import Workspaces
from encore.devices import DeviceMemory, is_here, memory_of, reserves
from encore.errors import BudgetError, OptionError
from encore.graph import Graph, Role
from encore.options import Budget, Options
from encore.plan import DeviceRoom, ReservedFootprint, resident_on
from encore.schedule import devices_of
from encore.units import bytes_text


def on_devices(
    budget: Budget,
    graphs: Sequence[Graph],
    options: Options,
    workspaces: Workspaces,
    *,
    primals: Sequence[Any] = (),
    runs: bool = True,
    sharded: bool = False,
) -> Budget:
    """The budget for a step of these graphs on the devices that they compute on; `primals` are the tensors that the
    first one is called with. An estimate (not `runs`) takes the devices to have nothing of the model yet. The budget of
    a `sharded` model has no footprint."""
    if budget.is_floor or budget.share is not None or budget.footprint is not None:
        return budget
    devices = [device for device in devices_of(graphs) if reserves(device) and is_here(device)]
    if not devices:
        if budget.device:
            raise OptionError(
                "budget='device' is the memory of a GPU, and the model computes on another device; give bytes, such as "
                "budget='2GiB', or move the model first"
            )
        return budget
    memories = [memory_of(device) for device in devices]
    if sharded:
        return dataclasses.replace(budget, bytes=min(_limit(budget, memory) for memory in memories))
    state = options.resident if options.optimizer is None else options.optimizer.bytes_to_come(options.resident)
    addresses = _addresses(graphs[0], primals)
    rooms = []
    for memory in memories:
        resident = resident_on(memory.device, graphs, addresses, state, there=runs)
        rooms.append(DeviceRoom(memory, _limit(budget, memory), resident, workspaces.trace))
    footprint = ReservedFootprint(tuple(rooms))
    return dataclasses.replace(budget, bytes=footprint.limit, footprint=footprint)


def _limit(budget: Budget, memory: DeviceMemory) -> int:
    """The bytes that may be reserved."""
    if budget.device or budget.bytes is None:
        return memory.usable
    left = min(budget.bytes - memory.context, memory.usable)
    if left <= 0:
        raise BudgetError(
            f"a budget of {bytes_text(budget.bytes)} cannot be met on {memory.device}: CUDA and its libraries take "
            f"{bytes_text(memory.context)} of it for themselves; raise the budget",
            floor=memory.context + memory.reserved,
        )
    return left


def _addresses(graph: Graph, primals: Sequence[Any]) -> dict[int, int]:
    """Where the inputs of a graph are, by value."""
    return {
        value: tensor.untyped_storage().data_ptr()
        for value, tensor in zip(graph.primals, primals, strict=False)
        if isinstance(tensor, torch.Tensor)
        and graph.values[value].role is Role.INPUT
        and tensor.layout is torch.strided
    }
