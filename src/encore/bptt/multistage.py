"""Asynchronous multistage checkpointing: states leave for a tier while computing goes on, and return ahead of need.

N. Kukreja, J. Hückelheim, G. Gorman. Backpropagation for long sequences: beyond memory constraints with constant
overheads. arXiv:1806.01117, 2018. A state takes T_T to move and a step T_A to run, so that every I-th state can leave
with I = ceil(T_T / T_A) and no step waits. Backward takes the intervals from the last to the first: while one is
reversed, the state before it is on its way. The cost a step depends on I and the memory, never on the length.

Beyond the paper: I is measured while the steps run, and a state whose turn comes while the tier is busy is simply
stored a little later; an interval whose tape fits is run again once, with its tape (2 forwards a step), and where
memory allows, I is as long as that permits, since it costs nothing; where the tape of an interval does not fit, Revolve
reverses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

from encore.bptt.actions import Action, Advance, FreeState, LoadState, Prefetch, Reverse, StoreState, Tape, TimeSchedule
from encore.bptt.revolve import reverse_range

Shape = Callable[[int], tuple[int, int]]
"""For an interval's length: the slots and the block that it is reversed with."""


class Pace(Protocol):
    """When the next state may be offloaded."""

    def interval(self) -> int:
        """Steps until then."""

    def ready(self) -> bool:
        """Return whether it would leave at once."""


class MeasuredPace:
    """From the seconds that steps and stores have taken so far."""

    def __init__(self, least: int, store_seconds: Callable[[], float], ready: Callable[[], bool]) -> None:
        self.least = least
        self.step_seconds = math.inf
        self._store_seconds = store_seconds
        self._ready = ready

    def note(self, steps: int, seconds: float) -> None:
        """Note the seconds of some steps. The fastest counts: delays by other programs would shorten the interval."""
        if steps:
            self.step_seconds = min(self.step_seconds, seconds / steps)

    def interval(self) -> int:
        if not 0 < self.step_seconds < math.inf:
            return self.least
        return max(self.least, math.ceil(self._store_seconds() / self.step_seconds))

    def ready(self) -> bool:
        return self._ready()


class Multistage(TimeSchedule):
    """Intervals in the tier, Revolve or a whole tape within each. `steps` where the length is known; `planned` is the
    planned interval."""

    name: ClassVar[str] = "multistage"

    def __init__(
        self, pace: Pace, shape: Shape, *, slots: int, block: int, steps: int | None, planned: int = 1
    ) -> None:
        self.pace = pace
        self.shape = shape
        self.slots = slots
        self.block = block
        self.steps = steps
        self.planned = planned
        self.stored: list[int] = []
        self._taped: int | None = None

    def forward(self) -> Iterator[Action]:
        """Where the length is known, the last block's tape is made on the way."""
        if self.steps == 0:
            return
        at = 0
        last = math.inf if self.steps is None else max(0, self.steps - self.block)
        while True:
            yield StoreState(at, "tier")
            self.late += at != len(self.stored) * self.planned
            self.stored.append(at)
            interval = self.pace.interval()
            to = at + interval
            while to < last:
                yield Advance(at, to)
                at = to
                if self.pace.ready():
                    break
                to = at + max(1, interval // 8)
            if to >= last:
                break
        assert self.steps is not None
        self.late += max(0, math.ceil(last / self.planned) - len(self.stored))  # those that did not leave at all
        self._taped = max(at, self.steps - self.block)
        if at < self._taped:
            yield Advance(at, self._taped)
        yield Tape(self._taped, self.steps)

    def backward(self, steps: int) -> Iterator[Action]:
        stop = steps
        while self.stored and self.stored[-1] >= stop:
            yield FreeState(self.stored.pop(), "tier")
        if self.stored:
            yield Prefetch(self.stored[-1])
        if self._taped is not None:
            yield Reverse(self._taped, stop)
            stop = self._taped
            if self.stored[-1] == stop:
                yield FreeState(self.stored.pop(), "tier")
                if self.stored:
                    yield Prefetch(self.stored[-1])
        while self.stored:
            start = self.stored.pop()
            yield LoadState(start, "tier")
            yield FreeState(start, "tier")
            if self.stored:
                yield Prefetch(self.stored[-1])
            slots, block = self.shape(stop - start)
            if stop - start <= block:
                yield Tape(start, stop)
                yield Reverse(start, stop)
            else:
                yield StoreState(start)
                yield from reverse_range(start, stop, slots, block, here=True)
            stop = start
