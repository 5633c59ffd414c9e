"""What one operator asks of an allocator, in order: its results among the blocks of its workspace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperatorTrace:
    """The allocations of one call."""

    events: tuple[int, ...]
    """An allocation as its bytes, counted from 0; a free as -1 minus the number of what is freed."""
    results: tuple[int | None, ...]
    """For each result, the number of its allocation; None if it has none of its own."""

    @classmethod
    def of(cls, history: Iterable[tuple[str, int, int]], results: Sequence[int]) -> OperatorTrace:
        """The trace of a history, with the addresses of the storages of the results. What is neither a result nor freed
        (a handle's workspace) stays behind, and is not the operator's."""
        sizes, freed = list[int](), set[int]()
        order: list[int] = []
        alive: dict[int, int] = {}
        for what, size, address in history:
            if what == "alloc":
                alive[address] = len(sizes)
                order.append(len(sizes))
                sizes.append(size)
            elif what == "free_requested" and address in alive:
                number = alive.pop(address)
                freed.add(number)
                order.append(-1 - number)
        made = tuple(alive.get(address) for address in results)
        kept = sorted(freed | {number for number in made if number is not None})
        names = {number: place for place, number in enumerate(kept)}
        events = [
            sizes[number] if number >= 0 else -1 - names[-1 - number]
            for number in order
            if (number if number >= 0 else -1 - number) in names
        ]
        return cls(tuple(events), tuple(None if number is None else names[number] for number in made))
