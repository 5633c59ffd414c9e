"""Everything a step allocates, as plain numbers and names, and what is alive at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of one value. Where another one is written over it, it goes and the other comes, at once."""

    name: str
    """The value, as the graph calls it."""
    operator: str
    """What makes it; empty for what was there before the step."""
    module: str
    source: str
    shape: tuple[int, ...]
    kind: str
    """What it is there for."""
    bytes: int
    device: str
    born: int
    """The event that brings it; births and deaths of a step are numbered together."""
    died: int | None
    """The event that takes it away; None where it outlives the step."""


def alive_at_peak(allocations: Sequence[Allocation]) -> list[Allocation]:
    """What is there at the moment when most is, largest first."""
    events = [(allocation.born, allocation.bytes) for allocation in allocations]
    events += [(allocation.died, -allocation.bytes) for allocation in allocations if allocation.died is not None]
    held, highest, worst = 0, -1, 0
    for event, size in sorted(events):
        held += size
        if held > highest:
            highest, worst = held, event
    alive = [item for item in allocations if item.born <= worst and (item.died is None or item.died > worst)]
    return sorted(alive, key=lambda item: -item.bytes)
