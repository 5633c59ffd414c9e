"""What the allocator does in a step, cut at marks that the step sets.

PyTorch has one profiler a thread, so an observation ends with the step: at the first `optimizer.step()`, at the next
call of the model, or when `measure` wants the profiler.
"""

from __future__ import annotations

import atexit
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from encore.cost.torch_private import AllocatorEvents, profiler_is_running
from encore.devices import devices_in_use

MARK_BYTES = 1_048_583
"""An allocation that nothing else makes: a prime number of bytes."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What happened between two marks, in bytes above what was alive when the observation began."""

    peak: int
    end: int


class Observation:
    """A running observation of one thread."""

    _running = threading.local()

    def __init__(self) -> None:
        self._events = AllocatorEvents()
        self._marks = 0
        self._thread = threading.get_ident()
        self._recorded: list[tuple[int, int]] | None = None
        self._hook: Any = None

    @classmethod
    def start(cls) -> Observation | None:
        """Begin to observe; None where the allocator cannot be observed."""
        if profiler_is_running() or devices_in_use():
            return None
        observation = cls()
        observation._hook = register_optimizer_step_pre_hook(lambda *_: observation._end())
        observation._events.start()
        atexit.register(observation._end)  # PyTorch crashes if a profiler runs when the process ends
        cls._running.one = observation
        return observation

    @classmethod
    def end_running(cls) -> None:
        """End the observation of this thread, if there is one."""
        running: Observation | None = getattr(cls._running, "one", None)
        if running is not None:
            running._end()

    def mark(self) -> int:
        """Set the next mark and return its number. Segment `n` ends at mark `n`."""
        if self._recorded is None:
            torch.UntypedStorage(MARK_BYTES)
        self._marks += 1
        return self._marks - 1

    def stop(self) -> list[Segment] | None:
        """End the observation and return its segments, one more than marks; None if some marks were not seen: the step
        ran in several threads, or went on after the observation."""
        self._end()
        segments: list[Segment] = []
        alive = peak = 0
        for _, size in self._recorded or ():
            if size == MARK_BYTES:
                segments.append(Segment(peak, alive))
                peak = alive
            elif size != -MARK_BYTES:
                alive += size
                peak = max(peak, alive)
        segments.append(Segment(peak, alive))
        return segments if len(segments) == self._marks + 1 else None

    def _end(self) -> None:
        if self._recorded is None and self._thread == threading.get_ident():
            self._recorded = self._events.stop()
            self._hook.remove()
            atexit.unregister(self._end)
            self._running.one = None
