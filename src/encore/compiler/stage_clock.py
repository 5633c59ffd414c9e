"""How long each stage of a compilation takes."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator


class StageClock:
    """Seconds by stage, in the order in which stages ran first."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = seconds or {}
        self.started = time.perf_counter()

    def lap(self, stage: str) -> None:
        """The time since the last lap belongs to this stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.started
        self.started = now


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Planning makes a million small objects that stay, and no cycles: Python's collector would look through them, and
    through the traced graph, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
