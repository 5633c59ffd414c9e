"""Everything a step allocates, as plain numbers and names, and what is alive at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of one value. If another value is written over it, the one ends and the other begins at once."""

    name: str
    """The value, as the graph calls it."""
    operator: str
    """The operator that computes it; empty for what was alive before the step."""
    module: str
    source: str
    shape: tuple[int, ...]
    kind: str
    """Its kind, such as a gradient or a workspace."""
    bytes: int
    device: str
    born: int
    """The event that allocates it; births and deaths of a step are numbered together."""
    died: int | None
    """The event that frees it; None if it outlives the step."""


def alive_at_peak(allocations: Sequence[Allocation]) -> list[Allocation]:
    """What is alive at the peak, largest first."""
    events = [(allocation.born, allocation.bytes) for allocation in allocations]
    events += [(allocation.died, -allocation.bytes) for allocation in allocations if allocation.died is not None]
    held, highest, worst = 0, -1, 0
    for event, size in sorted(events):
        held += size
        if held > highest:
            highest, worst = held, event
    alive = [item for item in allocations if item.born <= worst and (item.died is None or item.died > worst)]
    return sorted(alive, key=lambda item: -item.bytes)
