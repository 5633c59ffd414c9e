"""The seconds of each stage of a compilation."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator


class StageClock:
    """Measures seconds by stage, in the order in which stages first ran."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = seconds or {}
        self.started = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.started
        self.started = now


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable Python's garbage collector: planning allocates a million small objects without cycles, which it would
    traverse again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
