"""Which schedule: the fewest forward steps that the memory allows.

All candidates have a closed formula for their forward steps, so that choosing takes as long for a million steps as for
a thousand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from encore.bptt.actions import TimeSchedule
from encore.bptt.keep import KeepTape
from encore.bptt.multistage import MeasuredPace, Multistage
from encore.bptt.online import Online
from encore.bptt.revolve import Revolve, range_advances
from encore.errors import BudgetError, OptionError
from encore.options import parse_budget
from encore.units import bytes_text

NAMES = ("auto", "keep", "revolve", "multistage")
ASSUMED_STEPS = 10_000
"""Steps that a sequence of unknown length is planned with."""
AHEAD = 2
"""States of the tier that are in memory at once during backward: the one that was loaded, and the next."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory for states and tapes: in bytes, or as a number of states with one step on the tape."""

    budget: int | None
    slots: int | None
    state: int
    """Bytes of one state."""
    tape: int
    """Bytes that one step leaves for backward."""
    work: int
    """Bytes that backward of one step takes besides that, and the working state."""
    tier: int = 0
    """Bytes of the tier's workspace."""

    def slots_with(self, block: int, *, staged: bool) -> int:
        """States that fit next to a tape of `block` steps."""
        if self.slots is not None:
            return self.slots if block == 1 else 0
        return max(0, (self._free(staged) - block * self.tape) // max(1, self.state))

    def longest_tape(self, *, staged: bool) -> int:
        """Steps whose tape fits next to one state."""
        if self.slots is not None:
            return 1
        return max(0, (self._free(staged) - self.state) // max(1, self.tape))

    def bytes(self, slots: int, block: int, *, staged: bool) -> int:
        """The peak of a schedule of this shape."""
        return self._workspace(staged) + slots * self.state + block * self.tape

    def _workspace(self, staged: bool) -> int:
        return self.work + (self.tier + AHEAD * self.state if staged else 0)

    def _free(self, staged: bool) -> int:
        assert self.budget is not None
        return self.budget - self._workspace(staged)

    @property
    def floor(self) -> int:
        """The least that anything takes: one state and one step."""
        return self.bytes(1, 1, staged=False)

    def shape(self, steps: int, *, staged: bool) -> tuple[int, int]:
        """Slots and block with the fewest forward steps over so many."""
        longest = min(self.longest_tape(staged=staged), max(1, steps))
        best = (math.inf, 0, 0, 0)
        for block in _candidates(longest, steps):
            slots = self.slots_with(block, staged=staged)
            if slots:
                slots = min(slots, max(1, -(-steps // block)))
                best = min(best, (range_advances(steps, slots, block), block, slots, block))
        return best[2], best[3]


@dataclass(frozen=True, slots=True)
class RoomAsked:
    """How much memory the user gives, and the schedule that they name."""

    budget: int | str | None
    slots: int | None
    schedule: str

    def room(self, state: int, tape: int, work: int, tier: int, *, staged: bool) -> tuple[str, Room]:
        """The name of the schedule, and the room for states and tapes of these bytes."""
        if self.budget is not None:
            asked = parse_budget(self.budget)
            if asked.share is not None:
                raise OptionError(
                    f"budget={self.budget!r}: the unplanned peak of a scan is not known; give bytes, or 'min'"
                )
            room = Room(None, None, state, tape, work, tier)
            return self.schedule, dataclasses.replace(room, budget=room.floor if asked.is_floor else asked.bytes)
        if self.slots is None:
            if staged:
                raise OptionError("tiers= needs to know how much stays in memory; give budget= or slots=")
            if self.schedule not in ("auto", "keep"):
                raise OptionError(
                    f"schedule={self.schedule!r} needs to know how much memory there is; give budget= or slots="
                )
            return "keep", Room(None, None, state, tape, work, tier)
        return self.schedule, Room(None, self.slots, state, tape, work, tier)


def _candidates(longest: int, steps: int) -> Iterable[int]:
    """Candidate blocks: short ones, and the shortest that make few blocks."""
    few = {-(-steps // count) for count in range(1, 65)}
    grown = {int(1.1**power) for power in range(int(math.log(max(1, longest), 1.1)) + 1)}
    return sorted(block for block in {*range(1, 65), *few, *grown, longest} if 1 <= block <= longest)


@dataclass(frozen=True, slots=True)
class TimeChoice:
    """A schedule, with its predictions."""

    schedule: TimeSchedule
    forwards: int | None
    """Runs of a step in all; `None` if the length is not known."""
    bytes: int
    """The peak of states and tapes."""
    interval: int | None = None
    """Steps between states in the tier, as planned."""


def choose(name: str, steps: int | None, room: Room, pace: MeasuredPace | None) -> TimeChoice:
    """The cheapest schedule that fits, or the one that was named. `pace` if there is a tier."""
    if name not in NAMES:
        raise OptionError(f"schedule={name!r} does not exist; it can be {', '.join(map(repr, NAMES))}")
    candidates: dict[str, Callable[[], TimeChoice | None]] = {
        "keep": lambda: _keep(steps, room, forced=name == "keep"),
        "revolve": lambda: _revolve(steps, room),
        "multistage": lambda: _multistage(steps, room, pace),
    }
    found = [choice for one in (candidates if name == "auto" else (name,)) if (choice := candidates[one]()) is not None]
    if not found:
        raise _does_not_fit(name, steps, room, pace)
    return min(found, key=lambda choice: math.inf if choice.forwards is None else choice.forwards)


def _keep(steps: int | None, room: Room, *, forced: bool) -> TimeChoice | None:
    if steps is None or (room.slots is not None and not forced):
        return None
    size = room.work + steps * room.tape
    if room.budget is not None and size > room.budget:
        return None
    return TimeChoice(KeepTape(steps), steps, size)


def _revolve(steps: int | None, room: Room) -> TimeChoice | None:
    slots, block = room.shape(ASSUMED_STEPS if steps is None else steps, staged=False)
    if not slots:
        return None
    size = room.bytes(slots, block, staged=False)
    if steps is None:
        return TimeChoice(Online(slots, block), None, size)
    return TimeChoice(Revolve(steps, slots, block), Revolve.forwards(steps, slots, block), size)


def _multistage(steps: int | None, room: Room, pace: MeasuredPace | None) -> TimeChoice | None:
    longest = room.longest_tape(staged=True)
    if pace is None or not longest or not room.slots_with(1, staged=True):
        return None
    pace.least = longest if steps is None else max(1, min(longest, steps))
    shape = functools.cache(functools.partial(room.shape, staged=True))
    interval = pace.interval()
    slots, block = shape(interval)
    most = room.slots_with(1, staged=True)
    schedule = Multistage(pace, shape, slots=most, block=longest, steps=steps, planned=interval)
    size = room.bytes(slots, block, staged=True)
    if steps is None:
        return TimeChoice(schedule, 2 * ASSUMED_STEPS, size, interval)
    last = min(schedule.block, steps)
    whole, rest = divmod(steps - last, interval)
    forwards = steps  # once each on the way, the last ones with a tape
    for count, length in ((whole, interval), (1, rest)):
        slots, block = shape(length)
        forwards += count * (length + range_advances(length, slots, block)) if length else 0
    return TimeChoice(schedule, forwards, size, interval)


def _does_not_fit(name: str, steps: int | None, room: Room, pace: MeasuredPace | None) -> Exception:
    if name == "multistage" and pace is None:
        return OptionError("schedule='multistage' moves states to a tier, and none was given: tiers=('disk',)")
    if name == "keep":
        if steps is None:
            return OptionError("schedule='keep' needs to know the length; give xs as tensors, or length=")
        floor = room.work + steps * room.tape
        remedy = f"give budget={floor} or more, or another schedule"
    else:
        floor = room.bytes(1, 1, staged=name == "multistage")
        remedy = f"give budget={floor} or more, or a step that keeps less"
    return BudgetError(
        f"a budget of {bytes_text(room.budget or 0)} is below the {bytes_text(floor)} that this scan needs at least: "
        f"a state of {bytes_text(room.state)}, a tape of {bytes_text(room.tape)} a step, {bytes_text(room.work)} for "
        f"backward of one; {remedy}",
        floor=floor,
        remedies=(remedy,),
    )
