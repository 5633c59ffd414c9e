"""Revolve: the fewest forward steps with which a sequence of known length can be reversed from s states in memory.

A. Griewank, A. Walther. Algorithm 799: Revolve. ACM TOMS 26(1), 2000. With beta(s, r) = C(s + r, s) and r the least
number with beta(s, r) >= n, no step needs to be run more than r times to get past it, and r n - beta(s + 1, r - 1) runs
are needed in all, besides the one of each step that leaves a tape. The s states include the first.

Here a *block* of steps stands where the paper has a step: a tape of several steps saves more runs than the states that
would fit in its place, where tapes are small. One block is the paper's schedule if it has one step, and the classical
periodic one (every m-th state kept, an interval's whole tape) if all blocks have a slot each. Optimal for equal steps
of known number; the cost a step grows with the length, as the root of degree s + 1 of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import ClassVar

from encore.bptt.actions import Action, Advance, FreeState, LoadState, Reverse, StoreState, Tape, TimeSchedule


def beta(slots: int, repeats: int) -> int:
    """The longest sequence that can be reversed from `slots` states running no step more than `repeats` times."""
    return math.comb(slots + repeats, slots) if repeats >= 0 and slots >= 0 else 0


@functools.lru_cache(maxsize=1 << 16)
def repeats_needed(steps: int, slots: int) -> int:
    """The least r with beta(slots, r) >= steps."""
    if slots == 1:
        return steps - 1
    low, high = 0, 1
    while beta(slots, high) < steps:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if beta(slots, middle) >= steps else (middle + 1, high)
    return low


def advances_needed(steps: int, slots: int) -> int:
    """Runs without a tape that reversing `steps` takes at least; each step's run with a tape comes on top."""
    if steps <= 1:
        return 0
    repeats = repeats_needed(steps, slots)
    return repeats * steps - beta(slots + 1, repeats - 1)


@functools.lru_cache(maxsize=1 << 16)
def split(steps: int, slots: int) -> int:
    """How far to advance from a stored state before storing another, with `slots` including the first.

    What lies before the new state is reversed from all slots, what lies behind it from one less. Any length that leaves
    neither side with more repeats than it must have is optimal; the longest of them is taken.
    """
    repeats = repeats_needed(steps, slots)
    return min(beta(slots, repeats - 1), steps - beta(slots - 1, repeats - 1), steps - 1)


def range_advances(steps: int, slots: int, block: int) -> int:
    """Runs without a tape that `reverse_range` makes.

    The first block, which may be short, is run over as often as any: `split` leaves before the new state more than
    could do with two repeats less, so that each one from the left takes one repeat away, down to none.
    """
    blocks = -(-steps // block)
    return block * advances_needed(blocks, slots) - (blocks * block - steps) * repeats_needed(blocks, slots)


def reverse_range(start: int, stop: int, slots: int, block: int, *, here: bool) -> Iterator[Action]:
    """Reverse steps `start` to `stop` - 1 from state `start`, which is stored in memory and takes one of the slots;
    `here` says whether it is the working state, too. Frees it.

    Blocks are counted from the end: where they do not come out even, the first one, which is run most often, is short.
    """
    stored = [start]
    while stored:
        last = stored[-1]
        blocks = -(-(stop - last) // block)
        if not here:
            yield LoadState(last)
        if blocks > 1:
            free = slots - len(stored)
            to = stop - block * (blocks - split(blocks, free + 1) if free else 1)
            yield Advance(last, to)
            if free:
                yield StoreState(to)
                stored.append(to)
                here = True
                continue
            last = to
        else:
            yield FreeState(stored.pop())
        yield Tape(last, stop)
        yield Reverse(last, stop)
        stop = last
        here = False


class Revolve(TimeSchedule):
    """Revolve over blocks. The last block's tape is made by forward, which runs through it anyway."""

    name: ClassVar[str] = "revolve"

    def __init__(self, steps: int, slots: int, block: int = 1) -> None:
        self.steps = steps
        self.slots = slots
        self.block = block
        self._stream: Iterator[Action] = iter(())

    @staticmethod
    def forwards(steps: int, slots: int, block: int = 1) -> int:
        """Runs of a step in all, those with a tape included."""
        return range_advances(steps, slots, block) + steps

    def forward(self) -> Iterator[Action]:
        if self.steps == 0:
            return
        yield StoreState(0)
        self._stream = reverse_range(0, self.steps, self.slots, self.block, here=True)
        for action in self._stream:
            yield action
            if isinstance(action, Tape):
                return

    def backward(self, steps: int) -> Iterator[Action]:
        yield from self._stream
