"""The private API of PyTorch that costs use: the profiler, started for memory alone, without recording operators.

Its public interface has no such mode. It reports every allocation and release of the CPU allocator. It can also record
operators and Python calls with them, and then knows which line allocates.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from encore.cost.lines import PlacedEvent, calls, placed_events

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
    """Record CPU allocations (positive) and releases (negative) between `start` and `stop`; with `lines`, operators and
    Python calls, too."""

    def start(self, *, lines: bool = False) -> None:
        self._lines = lines
        config = _profiler.ProfilerConfig(
            _profiler.ProfilerState.KINETO,
            False,  # no input shapes
            True,  # memory
            lines,  # Python calls
            False,  # no FLOPs
            False,  # no modules
            _profiler._ExperimentalConfig(),
        )
        activities = {_profiler.ProfilerActivity.CPU}
        # USER_SCOPE alone: memory events need a running profiler, and operators would each add an event of their own.
        scopes = {_profiler.RecordScope.USER_SCOPE}
        if lines:
            scopes |= {_profiler.RecordScope.FUNCTION, _profiler.RecordScope.BACKWARD_FUNCTION}
        with _silent_kineto():
            _autograd._prepare_profiler(config, activities)
            _autograd._enable_profiler(config, activities, scopes)

    forbids_hooks: bool | None = None
    """Whether code switched saved-tensor hooks off, as `torch.func.grad` does; None if calls were not recorded."""

    def stop(self) -> list[PlacedEvent]:
        """Every allocation and reported release, in order of time."""
        roots = list(_autograd._disable_profiler().experimental_event_tree())
        if self._lines:
            self.forbids_hooks = calls(roots, "disable_saved_tensors_hooks")
        return placed_events(roots)
