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
from typing import Any

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
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return Measurement(
        step_peak=torch.cuda.max_memory_allocated() - before,
        left=torch.cuda.memory_allocated() - before,
        seconds=seconds,
        result=result,
    )


def measure_cpu(function: Callable[[], Any]) -> Measurement:
    events = AllocatorEvents()
    started = time.perf_counter()
    events.start()
    try:
        result = function()
        seconds = time.perf_counter() - started
    finally:
        recorded = events.stop()
    live = peak = 0
    for _, size in recorded:
        live += size
        peak = max(peak, live)
    return Measurement(step_peak=peak, left=live, seconds=seconds, result=result)
