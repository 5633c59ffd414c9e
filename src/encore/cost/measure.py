"""What a call really allocates, told by the allocator.

On CPU, PyTorch's profiler reports every allocation and release with no operator recorded beside them, which costs a
microsecond each. On CUDA, the caching allocator keeps its own statistics.

Known shortcoming on CPU: a block that was there before the call and is released inside it goes unreported, so the
peak is then an upper bound. Drop old gradients (`zero_grad`) before measuring a step, not inside.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once, when the profiler first starts: it would chat on stderr


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
        from encore.report.format import bytes_text

        return f"peak {bytes_text(self.step_peak)}, left {bytes_text(self.left)}, {self.seconds:.3f} s"


def measure(function: Callable[[], Any]) -> Measurement:
    """Call the function once and tell what it allocated and how long it took."""
    gc.collect()  # garbage in cycles would be released somewhere inside
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
    events = allocator_events()
    started = time.perf_counter()
    events.start()
    try:
        result = function()
        seconds = time.perf_counter() - started
    finally:
        sizes = events.stop()
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return Measurement(step_peak=peak, left=live, seconds=seconds, result=result)


class allocator_events:  # noqa: N801 - reads as a verb phrase at the call site
    """Record CPU allocations (positive) and releases (negative) between `start` and `stop`, in order of time."""

    def start(self) -> None:
        config = torch._C._profiler.ProfilerConfig(
            torch._C._profiler.ProfilerState.KINETO,
            False,  # no input shapes
            True,  # memory
            False,  # no stacks
            False,  # no FLOPs
            False,  # no modules
            torch._C._profiler._ExperimentalConfig(),
        )
        activities = {torch._C._profiler.ProfilerActivity.CPU}
        torch._C._autograd._prepare_profiler(config, activities)
        # USER_SCOPE alone: memory events need a running profiler, and operators would each add an event of their own.
        torch._C._autograd._enable_profiler(config, activities, {torch._C._profiler.RecordScope.USER_SCOPE})

    def stop(self) -> list[int]:
        results = torch._C._autograd._disable_profiler()
        events = [event for event in results.events() if event.name() == "[memory]"]
        events = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
        return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
