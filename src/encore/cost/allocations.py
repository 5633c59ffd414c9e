"""What a call allocates, as the allocator reports it.

On CPU, PyTorch's profiler reports every allocation and release, without records of operators, at a microsecond each. On
CUDA, the caching allocator has statistics of its own.

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

from encore.cost.observation import Observation
from encore.cost.torch_private import AllocatorEvents, profiler_is_running
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
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return measure_cuda(function)
    return measure_cpu(function)


def measure_cuda(function: Callable[[], Any]) -> Measurement:
    return _measured(_CudaMeter(), function)


def measure_cpu(function: Callable[[], Any]) -> Measurement:
    return _measured(_CpuMeter(), function)


def start_meter() -> Meter | None:
    """Begin to measure what no function encloses, such as a step of a host's loop; None while a profiler runs."""
    Observation.end_running()
    if profiler_is_running():
        return None
    return _CudaMeter() if torch.cuda.is_available() and torch.cuda.is_initialized() else _CpuMeter()


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
        for _, size in self._events.stop():
            live += size
            peak = max(peak, live)
        return peak, live


class _CudaMeter:
    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def stop(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._before, torch.cuda.memory_allocated() - self._before


def _measured(meter: Meter, function: Callable[[], Any]) -> Measurement:
    started = time.perf_counter()
    try:
        result = function()
    except BaseException:
        meter.stop()
        raise
    seconds = time.perf_counter() - started
    peak, left = meter.stop()
    return Measurement(step_peak=peak, left=left, seconds=seconds, result=result)
