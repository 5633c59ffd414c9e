"""Time compiled kernels on made-up operands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from encore.cost.probe import made_up, span
from encore.cost.room import has_room, sets_of_operands
from encore.cost.seconds import Seconds
from encore.cost.signature import is_here
from encore.cost.timing import seconds_of
from encore.cost.torch_private import profiler_is_running
from encore.graph import OpClass
from encore.graph.ops import classify
from encore.graph.values import refs
from encore.schedule.kernel import Call as KernelCall
from encore.schedule.kernel import Kernel, Operand

if TYPE_CHECKING:
    from encore.lower.kernels import CompiledKernel

log = logging.getLogger("encore")

Call = Callable[[list[Any]], tuple[Any, ...]]
UNCHANGED = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
"""Of zeros they make zeros."""


def time_kernels(seconds: Seconds, kernels: Mapping[str, Kernel], compiled: Mapping[str, CompiledKernel]) -> None:
    """Have every kernel's seconds known: those that never were timed on this machine are timed now."""
    for key, kernel in kernels.items():
        if key not in compiled or seconds.knows(key):
            continue
        if not seconds.run or profiler_is_running() or not may_run(kernel):
            continue
        try:
            found = kernel_seconds(kernel, compiled[key].call)
        except Exception as error:  # made-up operands may be refused; the step itself will still run
            log.info("the seconds of kernel %s are a guess: it could not be run (%s)", key, error)
        else:
            seconds.learn(key, found)


def kernel_seconds(kernel: Kernel, call: Call) -> float:
    """Time one compiled kernel. `call` takes a list of operands and empties it. What it writes over is made good before
    every run: halved a hundred times, numbers are so small that processors take far longer over them."""
    with torch.no_grad():
        sets = [_operands(kernel) for _ in range(sets_of_operands(_footprint(kernel)))]
        calls = [_bound(call, operands) for operands in sets]
        if not kernel.over:
            return seconds_of(calls, cuda=_on_cuda(kernel))
        spoiled = [operands[number] for operands in sets for _, number in kernel.over]
        good = [tensor.clone() for tensor in spoiled]

        def refresh() -> None:
            for tensor, original in zip(spoiled, good, strict=True):
                tensor.copy_(original)

        return seconds_of(calls, cuda=_on_cuda(kernel), refresh=refresh)


def may_run(kernel: Kernel) -> bool:
    """Are there devices and memory for its operands, and will it take made-up ones? An index out of bounds ends the
    process: no kernel is tried that computes one."""
    if any(0 in operand.shape for operand in kernel.operands) or not all(map(is_here, kernel.devices)):
        return False
    if _computes_an_index(kernel):
        return False
    return has_room(_footprint(kernel), cuda=_on_cuda(kernel))


def _computes_an_index(kernel: Kernel) -> bool:
    """Does it index by anything but an operand as it is? Those are made up of zeros."""
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
    """Laid out as the kernel was promised; it checks nothing."""
    generators = {device: torch.Generator(device) for device in kernel.devices}
    return [_operand(operand, generators[operand.device]) for operand in kernel.operands]


def _operand(operand: Operand, generator: torch.Generator) -> torch.Tensor:
    return made_up(operand, operand.device, generator, offset=0 if operand.aligned else 1)


def _footprint(kernel: Kernel) -> int:
    """Bytes of operands and results; a result is taken to be as precise as the most precise operand."""
    widest = max((operand.dtype.itemsize for operand in kernel.operands), default=4)
    given = sum(span(operand.shape, operand.stride) * operand.dtype.itemsize for operand in kernel.operands)
    return given + widest * sum(map(span, kernel.shapes, kernel.layouts))


def _on_cuda(kernel: Kernel) -> bool:
    return any(device.startswith("cuda") for device in kernel.devices)
