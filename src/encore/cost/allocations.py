"""What a call allocates, as the allocator reports it.

On CPU, PyTorch's profiler reports every allocation and release, without records of operators, at a microsecond each.
Accelerators have statistics of their own. A call that allocates on accelerators is measured on the one with the highest
peak; any other on the CPU, whatever devices the process has.

Known shortcoming on CPU: a block that was there before the call and is released inside it goes unreported, so the
peak is then an upper bound. Drop old gradients (`zero_grad`) before measuring a step, not inside.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from encore.cost.lines import own_events
from encore.cost.observation import Observation
from encore.cost.torch_private import AllocatorEvents, profiler_is_running
from encore.devices import devices_in_use, synchronize
from encore.errors import EncoreError


@dataclass(frozen=True, slots=True)
class Measurement:
    """One call, measured."""

    step_peak: int
    """Most bytes alive at once, above what was alive when the call began."""
    left: int
    """Bytes still alive when it returned."""
    seconds: float
    result: Any

    def __str__(self) -> str:
        from encore.units import bytes_text

        return f"peak {bytes_text(self.step_peak)}, left {bytes_text(self.left)}, {self.seconds:.3f} s"


def measure(function: Callable[[], Any]) -> Measurement:
    """Call the function once and return what it allocated and how long it took."""
    Observation.end_running()
    if profiler_is_running():
        raise EncoreError(
            "encore.measure uses PyTorch's profiler, and one is running already; call it outside of that profiler"
        )
    gc.collect()  # garbage in cycles would be released during the call
    return _measured(_MeterOfAll(), function)


def measure_accelerator(function: Callable[[], Any], device: str | torch.device) -> Measurement:
    """Call the function once and return what it allocated on one device."""
    return _measured(_AcceleratorMeter(torch.device(device)), function)


def measure_cpu(function: Callable[[], Any]) -> Measurement:
    return _measured(_CpuMeter(), function)


def start_meter() -> Meter | None:
    """Begin to measure what no function encloses, such as a step of a host's loop; None while a profiler runs."""
    Observation.end_running()
    if profiler_is_running():
        return None
    return _MeterOfAll()


class Meter(Protocol):
    """A measurement that is running."""

    def stop(self) -> tuple[int, int]:
        """End it; return peak and bytes left, above what was alive when it began."""


class _CpuMeter:
    def __init__(self) -> None:
        self._events = AllocatorEvents()
        self._events.start()

    def stop(self) -> tuple[int, int]:
        live = peak = 0
        for event in own_events(self._events.stop()):
            live += event.bytes
            peak = max(peak, live)
        return peak, live


class _AcceleratorMeter:
    def __init__(self, device: torch.device) -> None:
        synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        self.device, self._before = device, torch.accelerator.memory_allocated(device)
        self._blocks = self._allocations()

    def _allocations(self) -> int:
        found: int = torch.accelerator.memory_stats(self.device).get("allocation.all.allocated", 0)
        return found

    @property
    def was_used(self) -> bool:
        """Whether anything has been allocated on the device."""
        return self._allocations() > self._blocks

    def stop(self) -> tuple[int, int]:
        peak, now = (
            read(self.device) for read in (torch.accelerator.max_memory_allocated, torch.accelerator.memory_allocated)
        )
        return peak - self._before, now - self._before


class _MeterOfAll:
    """The CPU and every accelerator in use; the CPU counts if nothing is allocated elsewhere."""

    def __init__(self) -> None:
        self._accelerators = [_AcceleratorMeter(device) for device in devices_in_use()]
        self._cpu = _CpuMeter()

    def stop(self) -> tuple[int, int]:
        cpu = self._cpu.stop()
        return max((meter.stop() for meter in self._accelerators if meter.was_used), default=cpu)


def _measured(meter: Meter, function: Callable[[], Any]) -> Measurement:
    started = time.perf_counter()
    try:
        result = function()
        synchronize()
    except BaseException:
        meter.stop()
        raise
    seconds = time.perf_counter() - started
    peak, left = meter.stop()
    return Measurement(step_peak=peak, left=left, seconds=seconds, result=result)
