"""Time compiled kernels on random operands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from encore.cost.probe import random_tensor, trace_of_call
from encore.cost.room import has_room, sets_of_operands
from encore.cost.scaled_seconds import ScaledSeconds
from encore.cost.seconds import Seconds
from encore.cost.timing import seconds_of
from encore.cost.torch_private import profiler_is_running
from encore.devices import is_here, kind_of
from encore.graph import OpClass
from encore.graph.ops import classify
from encore.graph.values import refs, span_elements
from encore.schedule.kernel import Kernel, KernelCall, Operand

if TYPE_CHECKING:
    from encore.cost.workspace import Workspaces
    from encore.lower.kernels import CompiledKernel

log = logging.getLogger("encore")

Call = Callable[[list[Any]], tuple[Any, ...]]
UNCHANGED = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
"""Their results for zeros are zeros."""


def time_kernels(
    seconds: Seconds | ScaledSeconds, kernels: Mapping[str, Kernel], compiled: Mapping[str, CompiledKernel]
) -> None:
    """Time the kernels that have not been timed on this machine."""
    for key, kernel in kernels.items():
        if key not in compiled or seconds.knows(kernel):
            continue
        if not seconds.run or profiler_is_running() or not may_run(kernel):
            continue
        try:
            found = kernel_seconds(kernel, compiled[key].call)
        except Exception as error:  # of any kind: a kernel may reject random operands, and still run in the step
            log.info("the seconds of kernel %s are an estimate: it cannot be run (%s)", key, error)
        else:
            seconds.learn(kernel, found)


def kernel_seconds(kernel: Kernel, call: Call) -> float:
    """Time one compiled kernel. `call` takes a list of operands and empties it. Operands that it writes over are
    restored before every run: numbers that are halved a hundred times become subnormal, which is far slower."""
    with torch.no_grad():
        sets = [_operands(kernel) for _ in range(sets_of_operands(_footprint(kernel)))]
        calls = [_bound(call, operands) for operands in sets]
        if not kernel.over:
            return seconds_of(calls, device=_device(kernel))
        overwritten = [operands[number] for operands in sets for _, number in kernel.over]
        originals = [tensor.clone() for tensor in overwritten]

        def refresh() -> None:
            for tensor, original in zip(overwritten, originals, strict=True):
                tensor.copy_(original)

        return seconds_of(calls, device=_device(kernel), refresh=refresh)


def trace_kernels(
    workspaces: Workspaces, kernels: Mapping[str, Kernel], compiled: Mapping[str, CompiledKernel]
) -> None:
    """Have kernels on accelerators run once more, to see what each asks of the allocator, and in which order."""
    for key, kernel in kernels.items():
        untraced = key in compiled and kind_of(_device(kernel)) != "cpu" and workspaces.kernel_trace(key) is None
        if not untraced or profiler_is_running() or not may_run(kernel):
            continue
        try:
            with torch.no_grad():
                found = trace_of_call(_bound(compiled[key].call, _operands(kernel)), torch.device(_device(kernel)))
        except Exception as error:  # of any kind: a kernel may reject random operands, and still run in the step
            log.info("what kernel %s allocates is an estimate: it cannot be run (%s)", key, error)
        else:
            workspaces.learn_trace(key, found)


def may_run(kernel: Kernel) -> bool:
    """Return whether there are devices and memory for its operands, and it accepts random ones. An index out of bounds
    ends the process, so a kernel that computes an index is not run."""
    if any(0 in operand.shape for operand in kernel.operands) or not all(map(is_here, kernel.devices)):
        return False
    if _computes_an_index(kernel):
        return False
    return has_room(_footprint(kernel), _device(kernel))


def _computes_an_index(kernel: Kernel) -> bool:
    """Return whether it indexes by anything but an operand as it is, which is filled with zeros."""
    given = set(range(len(kernel.operands)))
    number = len(given)
    for call in kernel.calls:
        if any(value not in given for value in refs(_indices(call))):
            return True
        unchanged = classify(call.target) is OpClass.VIEW or call.target in UNCHANGED
        for _ in filter(None, call.results):
            if unchanged and all(value in given for value in refs(call.args)):
                given.add(number)
            number += 1
    return False


def _indices(call: KernelCall) -> list[Any]:
    named = zip(call.target._schema.arguments, call.args, strict=False)
    return [argument for declared, argument in named if declared.name in ("index", "indices")]


def _bound(call: Call, operands: list[torch.Tensor]) -> Callable[[], Any]:
    return lambda: call([*operands])


def _operands(kernel: Kernel) -> list[torch.Tensor]:
    """Random operands with the layouts that the kernel assumes without checking."""
    generators = {device: torch.Generator(device) for device in kernel.devices}
    return [_operand(operand, generators[operand.device]) for operand in kernel.operands]


def _operand(operand: Operand, generator: torch.Generator) -> torch.Tensor:
    return random_tensor(operand, operand.device, generator, offset=0 if operand.aligned else 1)


def _footprint(kernel: Kernel) -> int:
    """Bytes of operands and results; a result is assumed to have the widest type of the operands."""
    widest = max((operand.dtype.itemsize for operand in kernel.operands), default=4)
    given = sum(span_elements(operand.shape, operand.stride) * operand.dtype.itemsize for operand in kernel.operands)
    return given + widest * sum(map(span_elements, kernel.shapes, kernel.layouts))


def _device(kernel: Kernel) -> str:
    """The accelerator that it runs on, or the CPU."""
    return max(kernel.devices, key=lambda device: kind_of(device) != "cpu", default="cpu")
