"""An independent check of every schedule through time, which shares no code with those that make schedules.

`run` has it follow every action of every scan, and reports what it counted; the tests use it on bare schedules.
Rejected: a step run from a state that is not at hand, a load of a state that is not stored, a second tape, a gradient
taken over another tape or out of order, more states or steps on the tape than the limits, anything left at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from encore.bptt.actions import Action, Advance, FreeState, LoadState, Prefetch, Reverse, StoreState, Tape
from encore.errors import IllegalGraphError


@dataclass(slots=True)
class Counts:
    """What a schedule does, counted."""

    advanced: int = 0
    """Runs of a step that keep nothing."""
    taped: int = 0
    """Runs of a step that leave a tape."""
    memory_stores: int = 0
    memory_loads: int = 0
    tier_stores: int = 0
    tier_loads: int = 0
    most_slots: int = 0
    """States in memory at once, besides the working one."""
    longest_tape: int = 0
    most_in_tier: int = 0
    most_bytes: int = 0
    """The peak of stored states and of the tape together, if their sizes are given."""

    @property
    def forwards(self) -> int:
        """Runs of a step in all."""
        return self.advanced + self.taped


class Replayer:
    """Follows one schedule, action by action."""

    def __init__(self, *, slots: int | None = None, block: int | None = None, state: int = 0, tape: int = 0) -> None:
        self.counts = Counts()
        self.state_bytes = state
        self.tape_bytes = tape
        self.slots = slots
        self.block = block
        self.working: int | None = 0
        self.reached = 0
        self.memory: set[int] = set()
        self.tier: set[int] = set()
        self.coming: set[int] = set()
        self.tape: tuple[int, int] | None = None
        self.gradient: int | None = None

    def follow(self, action: Action) -> None:
        """Follow one action; raises `IllegalGraphError` if it cannot be done."""
        self._follow(action)
        taped = 0 if self.tape is None else self.tape[1] - self.tape[0]
        size = len(self.memory) * self.state_bytes + taped * self.tape_bytes
        self.counts.most_bytes = max(self.counts.most_bytes, size)

    def _follow(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self._run(start, stop, "advance")
                self.counts.advanced += stop - start
            case Tape(start, stop):
                self._run(start, stop, "tape")
                self._check(self.tape is None, f"tape of {start} to {stop} next to that of {self.tape}")
                self._check(self.block is None or stop - start <= self.block, f"{stop - start} steps on the tape")
                self.tape = start, stop
                self.counts.taped += stop - start
                self.counts.longest_tape = max(self.counts.longest_tape, stop - start)
            case Reverse(start, stop):
                self._check(self.gradient == stop, f"gradient at {self.gradient}, reversed from {stop}")
                self._check(self.tape == (start, stop), f"reverse of {start} to {stop} over the tape {self.tape}")
                self.gradient, self.tape, self.working = start, None, None
            case StoreState(step, level):
                self._check(self.working == step, f"store of {step} while {self.working} is at hand")
                stored = self.memory if level == "memory" else self.tier
                self._check(step not in stored, f"{step} stored twice")
                stored.add(step)
                self._count_stored(level)
            case Prefetch(step):
                self._check(step in self.tier, f"prefetch of {step}, which is not in the tier")
                self._check(step not in self.coming, f"prefetch of {step} twice")
                self.coming.add(step)
                self._check(len(self.coming) <= 2, f"{len(self.coming)} states on their way at once")
            case LoadState(step, level):
                stored = self.memory if level == "memory" else self.tier
                self._check(step in stored, f"load of {step}, which is not in {level}")
                self.working = step
                if level == "memory":
                    self.counts.memory_loads += 1
                else:
                    self.coming.discard(step)
                    self.counts.tier_loads += 1
            case FreeState(step, level):
                stored = self.memory if level == "memory" else self.tier
                self._check(step in stored, f"free of {step}, which is not in {level}")
                stored.remove(step)
                if level == "tier":
                    self.coming.discard(step)

    def turn(self, steps: int) -> None:
        """Begin backward: forward has ended after so many steps."""
        self._check(self.reached == steps, f"forward ends at {self.reached} of {steps}")
        self._check(self.tape is None or self.tape[1] == steps, f"forward leaves the tape {self.tape} of {steps}")
        self.gradient, self.working = steps, None

    def finish(self) -> Counts:
        """End backward, and return what was counted."""
        self._check(self.gradient == 0, f"backward ends at {self.gradient}")
        for left, where in ((self.memory, "memory"), (self.tier, "the tier")):
            self._check(not left, f"{sorted(left)[:3]} left in {where}")
        return self.counts

    def _run(self, start: int, stop: int, what: str) -> None:
        self._check(self.working == start, f"{what} from {start} while {self.working} is at hand")
        self._check(stop > start, f"{what} from {start} to {stop}")
        self._check(self.tape is None, f"{what} from {start} while there is a tape of {self.tape}")
        if self.gradient is None:
            self._check(start == self.reached, f"forward {what} from {start}, having reached {self.reached}")
            self.reached = stop
        else:
            self._check(stop <= self.gradient, f"{what} to {stop}, behind the gradient at {self.gradient}")
        self.working = stop

    def _count_stored(self, level: str) -> None:
        if level == "memory":
            self.counts.memory_stores += 1
            self.counts.most_slots = max(self.counts.most_slots, len(self.memory))
            self._check(self.slots is None or len(self.memory) <= self.slots, f"{len(self.memory)} states in memory")
        else:
            self.counts.tier_stores += 1
            self.counts.most_in_tier = max(self.counts.most_in_tier, len(self.tier))

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise IllegalGraphError(f"illegal schedule through time: {problem}")


def replay(
    forward: Iterable[Action],
    backward: Iterable[Action],
    steps: int,
    *,
    slots: int | None = None,
    block: int | None = None,
) -> Counts:
    """Follow both streams; raise `IllegalGraphError` at the first fault; return what was counted."""
    replayer = Replayer(slots=slots, block=block)
    for action in forward:
        replayer.follow(action)
    replayer.turn(steps)
    for action in backward:
        replayer.follow(action)
    return replayer.finish()
