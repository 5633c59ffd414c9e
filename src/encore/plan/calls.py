"""One budget for a step that calls several graphs, some of them many times.

What a graph saves in one call is there while every later call runs forward and backward. So a plan of a graph is no
longer described by one peak: a call takes its forward peak and its backward peak on top of what the others keep, and
adds its saved bytes to theirs (`CallCosts`). Where a step stands between its calls comes from a run of it (`Around`).

`SharedBudget` picks a plan for every call. Calls are gone through in the order of their forwards; a partial choice is
known by what it has added to the bytes that are kept, by the budget that it needs so far, and by its seconds. Those
that another one beats in all three are dropped, and so many are left that a step of a thousand calls takes a second.
The budget only picks from the complete ones: a larger budget never gives a slower step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from encore.graph import Graph
from encore.plan.plan import Plan
from encore.schedule import Free
from encore.schedule.simulator import Moment

MOST_PARTIAL = 1024
"""Partial choices that are kept from call to call."""
CELLS = 24
"""Parts into which kept bytes and needed budgets are divided to choose those."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CallCosts:
    """What one call of a graph takes with some plan, in bytes that the graph allocates itself."""

    saved: int
    """Alive between its forward and its backward."""
    forward_peak: int
    backward_peak: int
    """Saved bytes and the gradients of its outputs included, which stay until it is over."""
    seconds: float
    freeing_peak: int | None = None
    """The backward peak if nothing else keeps these gradients, so that they are freed at their last use; None: the
    same."""

    @classmethod
    def of(cls, plan: Plan, seconds: float = 0.0) -> CallCosts:
        """The costs of a call that runs this plan."""
        graph, timeline = plan.schedule.graph, plan.timeline
        kept = {graph.values[value].storage for value in plan.schedule.saved}
        returned = {graph.values[value].storage for value in graph.returned} - kept
        outlive = _own_bytes(graph, returned) if timeline.outputs_outlive else 0
        place = next(place for place, moment in enumerate(timeline.moments) if moment.phase == "between")
        backward = timeline.moments[place + 1 :]
        freed = freed_gradients(graph, backward)
        return cls(
            saved=_own_bytes(graph, kept),
            forward_peak=max(moment.peak for moment in timeline.moments[: place + 1]),
            backward_peak=max(moment.peak for moment in backward) - outlive,
            seconds=seconds,
            freeing_peak=max(moment.peak - less for moment, less in zip(backward, freed, strict=True)) - outlive,
        )

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    def backward(self, *, frees_received: bool) -> int:
        """The backward peak of a call that keeps or frees the gradients it is given."""
        return self.backward_peak if self.freeing_peak is None or not frees_received else self.freeing_peak

    def dominates(self, other: CallCosts) -> bool:
        """Return whether it is no worse in anything."""
        return (
            self.saved <= other.saved
            and self.forward_peak <= other.forward_peak
            and self.backward_peak <= other.backward_peak
            and self.backward(frees_received=True) <= other.backward(frees_received=True)
            and self.seconds <= other.seconds
        )


def received_bytes(graph: Graph) -> int:
    """The gradients of its outputs that a call is given, which are there before its backward begins."""
    return _own_bytes(graph, _received(graph))


def _received(graph: Graph) -> set[int | None]:
    copied = {graph.values[value].storage for value in graph.copied_tangents}
    return {graph.values[value].storage for value in graph.tangents} - copied


def freed_gradients(graph: Graph, backward: Sequence[Moment]) -> list[int]:
    """At every moment of backward, the bytes of gradients that were given and have been used for the last time."""
    storages = _received(graph) - {graph.values[value].storage for value in graph.gradients if value is not None}
    last: dict[int | None, int] = {}
    for number, moment in enumerate(backward):
        if isinstance(moment.action, Free):
            last[graph.values[moment.action.value].storage] = number
    freed = [0] * len(backward)
    for storage in storages & last.keys():
        freed[last[storage]] = _own_bytes(graph, {storage})
    return list(itertools.accumulate(freed))


def _own_bytes(graph: Graph, storages: set[int | None]) -> int:
    return sum(graph.storages[one].bytes for one in storages if one is not None and one not in graph.external)


@dataclass(frozen=True, slots=True)
class Around:
    """What a step keeps around one call, in bytes, when every call saves nothing of its own."""

    forward: int
    """When its forward begins."""
    backward: int
    """When its backward begins, without the gradients that it is given."""
    between: int = 0
    """At most while it is not the call that runs and no later call is pending: plain code, after its forward or before
    its backward."""
    frees_received: bool = False
    """Whether nothing but the call keeps the gradients that it is given."""


@dataclass(frozen=True, slots=True)
class SharedChoice:
    """A plan for every call, by number, with what the step comes to."""

    plans: tuple[int, ...]
    step_peak: int
    seconds: float


class SharedBudget:
    """Every choice that is worth having for one step."""

    def __init__(self, around: Sequence[Around], costs: Sequence[Sequence[CallCosts]], *, least: int = 0) -> None:
        """`least` is a peak that the step has whatever its plans."""
        self._parents: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        kept, needed, spent = np.zeros(1), np.full(1, float(least)), np.zeros(1)
        for place, offered in zip(around, costs, strict=True):
            saved, own, seconds = _columns(place, offered)
            count = len(offered)
            parent = np.repeat(np.arange(len(kept)), count)
            taken = np.tile(np.arange(count), len(kept))
            before = kept[parent]
            kept = before + saved[taken]
            needed = np.maximum(needed[parent], np.maximum(before + own[taken], kept + place.between))
            spent = spent[parent] + seconds[taken]
            best = _worth_having(kept, needed, spent)
            kept, needed, spent = kept[best], needed[best], spent[best]
            self._parents.append((parent[best], taken[best]))
        self._needed, self._spent = needed, spent

    @property
    def floor(self) -> int:
        """The lowest peak of the step."""
        return int(self._needed.min())

    def within(self, limit: int) -> SharedChoice | None:
        """The fastest choice whose step stays within so many bytes; None if there is none."""
        fitting = np.flatnonzero(self._needed <= limit)
        if not len(fitting):
            return None
        return self._choice(int(min(fitting, key=lambda number: (self._spent[number], self._needed[number]))))

    def choices(self) -> list[SharedChoice]:
        """Those that no other beats in both peak and seconds, fastest first."""
        found: list[int] = []
        for number in map(int, np.lexsort((self._needed, self._spent))):
            if not found or self._needed[number] < self._needed[found[-1]]:
                found.append(number)
        return [self._choice(number) for number in found]

    def lowest(self) -> SharedChoice:
        """The fastest choice among those with the lowest peak."""
        found = self.within(self.floor)
        assert found is not None
        return found

    def _choice(self, number: int) -> SharedChoice:
        peak, seconds = int(self._needed[number]), float(self._spent[number])
        plans = []
        for parent, taken in reversed(self._parents):
            plans.append(int(taken[number]))
            number = int(parent[number])
        return SharedChoice(tuple(reversed(plans)), peak, seconds)


def _columns(around: Around, offered: Sequence[CallCosts]) -> tuple[Numbers, Numbers, Numbers]:
    """Saved bytes, the peak of the call with what is there around it, and seconds, of every plan of a call."""
    frees = around.frees_received
    own = [
        max(around.forward + one.forward_peak, around.backward + one.backward(frees_received=frees)) for one in offered
    ]
    return (
        np.array([one.saved for one in offered], dtype=np.float64),
        np.array(own, dtype=np.float64),
        np.array([one.seconds for one in offered], dtype=np.float64),
    )


def _worth_having(kept: Numbers, needed: Numbers, spent: Numbers) -> NDArray[np.int64]:
    """The partial choices to go on with: those that no other one beats, thinned out evenly."""
    order = np.lexsort((spent, needed, kept))
    order = order[_first_of_equal(kept[order], needed[order])]
    if len(order) > MOST_PARTIAL:
        cells = _cell(kept[order]) * (CELLS + 1) + _cell(needed[order])
        fastest = np.lexsort((needed[order], kept[order], spent[order], cells))
        _, first = np.unique(cells[fastest], return_index=True)
        ends = [int(np.lexsort(keys)[0]) for keys in _orders(kept[order], needed[order], spent[order])]
        order = order[np.unique([*fastest[first], *ends])]
    return order[_not_beaten(kept[order], needed[order], spent[order])]


def _orders(kept: Numbers, needed: Numbers, spent: Numbers) -> list[tuple[Numbers, ...]]:
    return [(spent, kept, needed), (spent, needed, kept), (kept, needed, spent)]


def _first_of_equal(kept: Numbers, needed: Numbers) -> NDArray[np.bool_]:
    fresh = np.ones(len(kept), dtype=bool)
    fresh[1:] = (kept[1:] != kept[:-1]) | (needed[1:] != needed[:-1])
    return fresh


def _cell(numbers: Numbers) -> NDArray[np.int64]:
    low, high = numbers.min(), numbers.max()
    return ((numbers - low) * (CELLS / (high - low or 1.0))).astype(np.int64)


def _not_beaten(kept: Numbers, needed: Numbers, spent: Numbers) -> NDArray[np.bool_]:
    no_more = (kept[:, None] <= kept) & (needed[:, None] <= needed) & (spent[:, None] <= spent)
    less = (kept[:, None] < kept) | (needed[:, None] < needed) | (spent[:, None] < spent)
    return np.array(~(no_more & less).any(axis=0), dtype=bool)
