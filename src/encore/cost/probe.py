"""Run one operator of a graph by itself, on random tensors of the right layouts, and measure what it allocates."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from encore.cost.allocations import measure_accelerator, measure_cpu
from encore.cost.domains import Fill, fill_by_default, operand_domains
from encore.devices import generators_kept, kind_of
from encore.devices.torch_private import allocator_history
from encore.graph import Graph, Op, OpClass
from encore.graph.ops import OUT_ARGUMENT, OUT_VARIANT, WRITES_FIRST
from encore.graph.values import Value, map_refs, span_bytes, span_elements
from encore.lower.calls import callable_for
from encore.rnn.registry import MADE_UP
from encore.schedule.operator_trace import OperatorTrace

if TYPE_CHECKING:
    from encore.schedule.kernel import Operand


@dataclass(frozen=True, slots=True)
class ProbedWorkspace:
    """The peak of an operator's allocations, without its results."""

    bytes: int
    trace: OperatorTrace | None = None
    """What the operator asks of an accelerator's allocator; None on CPUs, and if it could not be recorded."""


def probe_workspace(graph: Graph, op: Op) -> ProbedWorkspace:
    """Run an operator and return its workspace."""
    call = random_call(graph, op)
    device = device_of_call(graph, op)
    with torch.no_grad(), generators_kept() if op.kind is OpClass.RANDOM else contextlib.nullcontext():
        if kind_of(device) == "cpu":
            measured = measure_cpu(call)
            return ProbedWorkspace(measured.step_peak - measured.left)
        trace = trace_of_call(call, torch.device(device))
        measured = measure_accelerator(call, device)
    return ProbedWorkspace(measured.step_peak - measured.left, trace)


def trace_of_call(call: Callable[[], Any], device: torch.device) -> OperatorTrace | None:
    """Return what a call asks of an accelerator's allocator, the second time that it runs: what is allocated once, such
    as the workspace of a handle, is there then. None where that cannot be recorded."""
    call()
    with allocator_history(device) as history:
        found = call()
    results = found if isinstance(found, tuple | list) else (found,)
    addresses = [one.untyped_storage().data_ptr() if isinstance(one, torch.Tensor) else 0 for one in results]
    return OperatorTrace.of(history.events, addresses) if history.known else None


def random_call(graph: Graph, op: Op, over: int | None = None) -> Callable[[], Any]:
    """The operator as the step calls it, bound to random operands; `over` is the one it writes over."""
    generators: dict[str, torch.Generator] = {}
    operands: dict[int, Any] = {}
    fills = operand_domains(graph, op)

    def operand(index: int) -> Any:
        if index not in operands:
            value = graph.values[index]
            assert value.storage is not None
            device = graph.storages[value.storage].device
            generator = generators.setdefault(device, torch.Generator(device))
            operands[index] = random_tensor(value, device, generator, fill=fills.get(index, fill_by_default))
        return operands[index]

    args = map_refs(op.args, operand)
    if op.target in MADE_UP:
        args = MADE_UP[op.target](args)
    kwargs = map_refs(op.kwargs, operand)
    target = op.target
    if over is not None and target in OUT_VARIANT:
        target = OUT_VARIANT[target]
        kwargs = {**kwargs, OUT_ARGUMENT[target]: operand(over)}
    elif over is not None:
        target = WRITES_FIRST[target]
    return functools.partial(callable_for(target), *args, **kwargs)


def device_of_call(graph: Graph, op: Op) -> str:
    """The device that a call runs on: the accelerator among those of its operands and results, if there is one."""
    values = (graph.values[value] for value in (*op.reads, *op.writes) if value is not None)
    devices = [graph.storages[value.storage].device for value in values if value.storage is not None]
    return next((device for device in devices if kind_of(device) != "cpu"), "cpu")


def device_of_step(graph: Graph) -> str:
    """The accelerator that a step computes on; the CPU if it uses none."""
    devices = (storage.device for storage in graph.storages)
    return next((device for device in devices if kind_of(device) != "cpu"), "cpu")


def random_tensor(
    like: Value | Operand,
    device: str,
    generator: torch.Generator,
    *,
    offset: int = 0,
    fill: Fill = fill_by_default,
) -> torch.Tensor:
    """A tensor with the shape, strides and type of a value, `offset` elements after the beginning of its storage."""
    assert like.dtype is not None
    memory = torch.empty(offset + span_elements(like.shape, like.stride), dtype=like.dtype, device=device)
    tensor = memory.as_strided(like.shape, like.stride, offset)
    fill(memory, tensor, generator)
    return tensor


def footprint(graph: Graph, op: Op) -> int:
    """Bytes of all operands and results."""
    return sum(span_bytes(graph.values[value]) for value in {*op.reads, *op.writes} if value is not None)
