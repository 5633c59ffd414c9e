"""A sequence of unknown length, from states in memory alone.

States are kept at equal distances. When their slots are full, every second one is freed and the distance doubles, so
that at any time they are spread evenly over what has been seen. Once the end is known, the intervals between them are
reversed one by one, each by Revolve in the slots that are free by then; some slots are kept back, since the first
interval to be reversed finds all others taken. Not optimal, as no online schedule can be: the tests bound its forward
steps by 1.5 times Revolve's, which knows the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from encore.bptt.actions import Action, Advance, FreeState, StoreState, TimeSchedule
from encore.bptt.revolve import reverse_range


class Online(TimeSchedule):
    """Doubling distances forward, Revolve within them backward."""

    name: ClassVar[str] = "online"

    def __init__(self, slots: int, block: int = 1) -> None:
        self.slots = slots
        self.block = block
        self.stored: list[int] = []

    def forward(self) -> Iterator[Action]:
        most = max(1, self.slots - self.slots // 3)
        distance, at = self.block, 0
        yield StoreState(0)
        self.stored.append(0)
        while True:
            to = (at // distance + 1) * distance
            yield Advance(at, to)
            at = to
            if len(self.stored) == most:
                for step in self.stored[1::2]:
                    yield FreeState(step)
                del self.stored[1::2]
                distance *= 2
            if at % distance == 0 and len(self.stored) < most:
                yield StoreState(at)
                self.stored.append(at)

    def backward(self, steps: int) -> Iterator[Action]:
        stop = steps
        while self.stored:
            start = self.stored.pop()
            if start >= stop:
                yield FreeState(start)
            else:
                yield from reverse_range(start, stop, self.slots - len(self.stored), self.block, here=False)
                stop = start
