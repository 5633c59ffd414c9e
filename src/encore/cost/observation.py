"""What the allocator does in a step, cut at marks that the step sets.

PyTorch has one profiler a thread, so an observation ends with the step: at the first `optimizer.step()`, at the next
call of the model, or when `measure` or another model wants the profiler.

Memory that was there before and is freed in the step counts as the step's while it is alive: old gradients that a loop
drops between forward and backward, say. PyTorch does not report such releases, so gradients are looked at in another
way (`watched`); other tensors that were there before go unseen.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from encore.cost.lines import Place, PlacedEvent, own_events
from encore.cost.torch_private import AllocatorEvents, profiler_is_running
from encore.devices import devices_in_use

MARK_BYTES = 1_048_583
FREED_BYTES = 1_048_589
"""Allocations that nothing else makes: prime numbers of bytes. The other one says that a watched tensor was freed."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What happened between two marks, in bytes above what was alive when the observation began."""

    peak: int
    end: int


@dataclass(frozen=True, slots=True)
class AliveBlock:
    """Memory that is alive at the peak of what was observed."""

    bytes: int
    segment: int
    """When it was allocated."""
    place: Place


class Observation:
    """A running observation of one thread; with `lines`, it records which line allocates, and the step takes longer."""

    _running = threading.local()

    def __init__(self, *, lines: bool, watched: Iterable[torch.Tensor]) -> None:
        self.lines = lines
        self._events = AllocatorEvents()
        self._watched = [weakref.ref(one, functools.partial(self._is_freed, one.nbytes)) for one in watched]
        self._freed: list[int] = []
        """The bytes of watched tensors that were freed, in this order."""
        self._marks = 0
        self._thread = threading.get_ident()
        self._recorded: list[PlacedEvent] | None = None
        self._hook: Any = None
        self.is_over = False
        """Whether nothing more of the step is expected. A profiler cannot be stopped inside of backward."""

    @classmethod
    def start(cls, *, lines: bool = False, watched: Iterable[torch.Tensor] = ()) -> Observation | None:
        """Begin to observe; None where the allocator cannot be observed. `watched` tensors may be freed meanwhile."""
        running: Observation | None = getattr(cls._running, "one", None)
        if running is not None and running.is_over:
            running.end()
        if profiler_is_running() or devices_in_use():
            return None
        observation = cls(lines=lines, watched=watched)
        observation._hook = register_optimizer_step_pre_hook(lambda *_: observation.end())
        observation._events.start(lines=lines)
        atexit.register(observation.end)  # PyTorch crashes if a profiler runs when the process ends
        cls._running.one = observation
        return observation

    @classmethod
    def end_running(cls) -> None:
        """End the observation of this thread, if there is one."""
        running: Observation | None = getattr(cls._running, "one", None)
        if running is not None:
            running.end()

    def mark(self) -> int:
        """Set the next mark and return its number. Segment `n` ends at mark `n`."""
        if self._recorded is None:
            torch.UntypedStorage(MARK_BYTES)
        self._marks += 1
        return self._marks - 1

    def _is_freed(self, size: int, _: Any) -> None:
        if self._recorded is None and self._thread == threading.get_ident():
            self._freed.append(size)
            torch.UntypedStorage(FREED_BYTES)

    def stop(self) -> list[Segment] | None:
        """End the observation and return its segments, one more than marks; None if some marks were not seen: the step
        ran in several threads, or went on after the observation."""
        self.end()
        segments: list[Segment] = []
        freed = iter(self._freed)
        alive = peak = sum(self._freed)
        for event in self._recorded or []:
            if event.bytes == MARK_BYTES:
                segments.append(Segment(peak, alive))
                peak = alive
            elif event.bytes == FREED_BYTES:
                alive -= next(freed, 0)
            elif -event.bytes not in (MARK_BYTES, FREED_BYTES):
                alive += event.bytes
                peak = max(peak, alive)
        segments.append(Segment(peak, alive))
        return segments if len(segments) == self._marks + 1 else None

    @property
    def allows_hooks(self) -> bool:
        """Return whether saved-tensor hooks may be put around the same code: where it switches them off, they raise.
        Known with `lines`."""
        return self._events.forbids_hooks is False

    def alive_at_peak(self, last: int) -> list[AliveBlock]:
        """What is alive where the segments up to number `last` have their peak, after `stop`; known with `lines`."""
        events = self._recorded or []
        held = highest = number = 0
        peak = -1
        for place, event in enumerate(events):
            number += event.bytes == MARK_BYTES
            if number > last:
                break
            held += 0 if abs(event.bytes) in (MARK_BYTES, FREED_BYTES) else event.bytes
            if held > highest:
                highest, peak = held, place
        alive: dict[int, AliveBlock] = {}
        number = 0
        for event in events[: peak + 1]:
            if event.bytes == MARK_BYTES:
                number += 1
            elif event.bytes > 0 and event.bytes != FREED_BYTES:
                alive[event.address] = AliveBlock(event.bytes, number, event.place)
            else:
                alive.pop(event.address, None)
        return list(alive.values())

    def end(self) -> None:
        """Observe no more: PyTorch has one profiler a thread."""
        if self._recorded is not None or self._thread != threading.get_ident():
            return
        self._recorded = own_events(self._events.stop())
        self._hook.remove()
        atexit.unregister(self.end)
        self._running.one = None
