"""The private API of PyTorch that costs use: the profiler, started for memory alone, without recording operators.

Its public interface has no such mode. It reports every allocation and release of the CPU allocator.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

LOG_LEVEL = "KINETO_LOG_LEVEL"
_profiler: Any = torch._C._profiler
_autograd: Any = torch._C._autograd


def profiler_is_running() -> bool:
    """Return whether a profiler is running: there is one a thread, and starting another would end the user's."""
    return bool(_autograd._profiler_enabled())


@contextlib.contextmanager
def _silent_kineto() -> Iterator[None]:
    """Kineto reads its log level once, when the profiler first starts, and would write to stderr by default."""
    if LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL]


class AllocatorEvents:
    """Record CPU allocations (positive) and releases (negative) between `start` and `stop`."""

    def start(self) -> None:
        config = _profiler.ProfilerConfig(
            _profiler.ProfilerState.KINETO,
            False,  # no input shapes
            True,  # memory
            False,  # no stacks
            False,  # no FLOPs
            False,  # no modules
            _profiler._ExperimentalConfig(),
        )
        activities = {_profiler.ProfilerActivity.CPU}
        with _silent_kineto():
            _autograd._prepare_profiler(config, activities)
            # USER_SCOPE alone: memory events need a running profiler, and operators would each add an event of their
            # own.
            _autograd._enable_profiler(config, activities, {_profiler.RecordScope.USER_SCOPE})

    def stop(self) -> list[tuple[int, int]]:
        """Time in nanoseconds and bytes of every event, in order of time."""
        events = [event for event in _autograd._disable_profiler().events() if event.name() == "[memory]"]
        cpu = [event for event in events if event.device_type() == _autograd.DeviceType.CPU]
        return sorted(((event.start_ns(), event.nbytes()) for event in cpu), key=lambda event: event[0])
