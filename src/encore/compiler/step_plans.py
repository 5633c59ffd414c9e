"""The plans of all calls of a step that was rehearsed on fake tensors: what they take together, and which to take.

What a step keeps around a call depends on the plans of the others: a tensor that one graph returns and another reads
counts once, whether the first saves it, the second, both, or plain code. The recording has the life of every tensor
without any plan; `StepPlans` adds what given plans save, and finds the peak of the step with them. `SharedBudget`
proposes choices around a few of these; every proposal is then judged by its own peak, and those that no other beats
are what budgets pick from. So a larger budget never gives a slower step.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from encore.capture.unused_outputs import Tangents
from encore.compiler.call_plans import CallPlans
from encore.compiler.device_budget import on_devices
from encore.compiler.recording import FakeBlock, RecordedGraph, Recording
from encore.compiler.step_calls import Program, step_peak
from encore.compiler.variants import Variant
from encore.graph import Graph
from encore.options import Budget, Options
from encore.plan import Plan, choose, stack_plans
from encore.plan.budget import budget_error
from encore.plan.calls import Around, CallCosts, SharedBudget, SharedChoice, received_bytes
from encore.plan.goal import Footprint

ROUNDS = 3
"""How often choices are proposed, each time around those of the lowest peak so far."""


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """What a call saves with some plan, of its outputs and inputs."""

    outputs: tuple[int, ...]
    """By position. Their memory is in the saved bytes of the plan."""
    inputs: tuple[int, ...]
    received: int
    """Bytes of the gradients that it is given."""

    @classmethod
    def of(cls, plan: Plan) -> SavedTensors:
        graph = plan.schedule.graph
        saved = {graph.values[value].storage for value in plan.schedule.saved}
        made = [None if value is None else graph.values[value].storage for value in graph.outputs]
        read = [graph.values[value].storage for value in graph.primals]
        return cls(
            outputs=tuple(place for place, one in enumerate(made) if one in saved - graph.external),
            inputs=tuple(place for place, one in enumerate(read) if one in saved),
            received=received_bytes(graph),
        )


class StepPlans:
    """Every choice of plans for a recorded step that is worth having."""

    def __init__(self, recording: Recording, options: Options) -> None:
        self.calls = recording.calls
        self.options = options
        self.graphs: list[RecordedGraph] = list(dict.fromkeys(call.graph for call in recording.calls))
        self.plans: Mapping[RecordedGraph, CallPlans] = {graph: graph.plans for graph in self.graphs}
        self.has_loss = recording.has_loss
        self._shards = recording.resident
        self._left = list(self.graphs)
        """Graphs that have not been captured from the model yet."""
        self._places = {block: place for place, block in enumerate(recording.memory.blocks)}
        self._returned = np.array([self._places[block] for block in recording.returned], dtype=np.int64)
        self._end = recording.memory.now + 1
        self._bytes = np.array([block.bytes for block in self._places], dtype=np.int64)
        self._born = np.array([block.born for block in self._places], dtype=np.int64)
        self._freed = np.array([min(block.freed, self._end) for block in self._places], dtype=np.int64)
        self._saved = functools.cache(self._saved_by)

        self.runs, self.workspaces = recording.session.runs, recording.session.workspaces
        self.footprint: Footprint | None = None
        """What the budget bounds instead of allocated bytes."""

    def beside(self, options: Options) -> StepPlans:
        """The same step with the resident bytes of these options."""
        other = copy.copy(self)
        other.options = options
        return other

    # -- the step with given plans -----------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        """Bytes that are there before the step."""
        if self._shards is not None:
            return self._shards + self.options.resident
        return stack_plans([self.plans[graph].kept for graph in self.graphs]).resident + self.options.resident

    @property
    def unplanned(self) -> int:
        """The peak with everything kept."""
        kept = [self.plans[call.graph] for call in self.calls]
        saved = [SavedTensors.of(one.kept) for one in kept]
        outside = self._outside(self._alive(saved, returned=True))
        return max(outside, step_peak(self._arounds(saved), [one.unplanned for one in kept]))

    def around(self, plans: Sequence[int], *, returned: bool = True) -> list[Around]:
        """What the step keeps around each call with these plans; the caller keeps what was `returned` to the end."""
        saved = [self._saved(call.graph, number) for call, number in zip(self.calls, plans, strict=True)]
        return self._arounds(saved, returned=returned)

    def peak(self, plans: Sequence[int], *, returned: bool = True) -> int:
        """The peak of the step with these plans."""
        costs = [self.plans[call.graph].costs[number] for call, number in zip(self.calls, plans, strict=True)]
        saved = [self._saved(call.graph, number) for call, number in zip(self.calls, plans, strict=True)]
        alive = self._alive(saved, returned=returned)
        return max(self._outside(alive), step_peak(self._arounds(saved, returned=returned), costs))

    def _outside(self, alive: NDArray[np.int64]) -> int:
        """The peak before the first call and after the last backward of a sharded model, which gathers and reduces
        there."""
        if self._shards is None:
            return 0
        first, last = min(call.marks[0] for call in self.calls), max(call.marks[3] for call in self.calls)
        return int(max(alive[: first + 1].max(), alive[last:].max()))

    def _saved_by(self, graph: RecordedGraph, number: int) -> SavedTensors:
        return SavedTensors.of(self.plans[graph].candidates[number].plan)

    def _arounds(self, saved: Sequence[SavedTensors], *, returned: bool = True) -> list[Around]:
        alive = self._alive(saved, returned=returned)
        marks = np.sort([mark for call in self.calls for mark in call.marks])
        found = []
        for call, one in zip(self.calls, saved, strict=True):
            begin, end, backward, _ = call.marks
            after = int(marks[np.searchsorted(marks, end, side="right")])
            before = int(marks[np.searchsorted(marks, backward) - 1])
            plain = max(alive[end : after + 1].max(), alive[before : backward + 1].max())
            kept = int(alive[backward]) - one.received
            found.append(Around(int(alive[begin]), kept, int(plain), frees_received=call.frees_received))
        return found

    def _alive(self, saved: Sequence[SavedTensors], *, returned: bool) -> NDArray[np.int64]:
        """Bytes alive at every moment, without what calls save themselves between their forward and backward."""
        freed = self._freed.copy()
        if returned:
            freed[self._returned] = self._end
        for call, one in zip(self.calls, saved, strict=True):
            kept = [self._places[block] for place in one.inputs if (block := call.reads[place]) is not None]
            freed[kept] = np.maximum(freed[kept], call.marks[3])
        change = np.zeros(self._end + 2, dtype=np.int64)
        np.add.at(change, self._born, self._bytes)
        np.add.at(change, freed, -self._bytes)
        for call, one in zip(self.calls, saved, strict=True):
            for block in {call.outputs[place] for place in one.outputs} - {None}:
                assert isinstance(block, FakeBlock)
                begin, end = call.marks[1], min(int(freed[self._places[block]]), call.marks[2] + 1)
                if begin < end:
                    change[begin] -= block.bytes
                    change[end] += block.bytes
        return np.cumsum(change)

    # -- choices -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def front(self) -> list[SharedChoice]:
        """The choices worth having, fastest first."""
        costs = [self.plans[call.graph].costs for call in self.calls]
        found: dict[tuple[int, ...], SharedChoice] = {}
        around = tuple(self.plans[call.graph].leanest for call in self.calls)
        for _ in range(ROUNDS):
            fresh = [one for one in SharedBudget(self.around(around), costs).choices() if one.plans not in found]
            if not fresh:
                break
            found |= {one.plans: dataclasses.replace(one, step_peak=self.peak(one.plans)) for one in fresh}
            around = min(found.values(), key=lambda one: one.step_peak).plans
        worth: list[SharedChoice] = []
        for one in sorted(found.values(), key=lambda one: (one.seconds, one.step_peak)):
            if not worth or one.step_peak < worth[-1].step_peak:
                worth.append(one)
        return worth

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each call's graph."""
        return tuple(call.graph.number for call in self.calls)

    @property
    def floor(self) -> int:
        """The lowest reachable peak of the step."""
        return self.front[-1].step_peak

    def overhead(self, choice: SharedChoice) -> float:
        """Extra seconds of a choice, as a fraction."""
        seconds = sum(self.plans[call.graph].unplanned.seconds for call in self.calls)
        return choice.seconds / seconds - 1 if seconds else 0.0

    def limit(self, budget: Budget, largest: int = 0) -> int | None:
        """The budget in bytes; None for the lowest reachable peak. A percentage is one of this unplanned step, or of
        the `largest` one that is known."""
        kept = [self.plans[call.graph].kept for call in self.calls]
        bound = on_devices(
            budget,
            [plan.schedule.graph for plan in kept],
            self.options,
            self.workspaces,
            runs=self.runs,
            sharded=self._shards is not None,
        )
        self.footprint = bound.footprint
        return None if budget.is_floor else bound.resolve(max(self.resident + self.unplanned, largest))

    def taken(self, choice: SharedChoice) -> int:
        """What budgets bound: what the step takes with a choice."""
        if self.footprint is None:
            return choice.step_peak + self.resident
        picked = zip(self.calls, choice.plans, strict=True)
        plans = [self.plans[call.graph].candidates[number].plan for call, number in picked]
        plain = max(0, choice.step_peak - stack_plans(plans).step_peak)
        return self.footprint(plans) + plain

    def search(self) -> bool:
        """Search the graphs whose plans were carried over from other sizes; return whether there were any."""
        found = [plans.search() for plans in self.plans.values()]
        if any(found):
            self.__dict__.pop("front", None)
            self._saved = functools.cache(self._saved_by)
        return any(found)

    def within(self, limit: int | None) -> SharedChoice:
        """The fastest choice within so many bytes; the one of the lowest peak if there is none, or for None."""
        fitting = (one for one in self.front if limit is not None and self._fits(one, limit))
        return next(fitting, self.front[-1])

    def _fits(self, choice: SharedChoice, limit: int) -> bool:
        return choice.step_peak + self.resident <= limit and self.taken(choice) <= limit

    def chosen(self, limit: int | None) -> SharedChoice:
        """The choice for a budget in bytes, with its plans compiled."""
        while True:  # compiled kernels may take other workspaces than was predicted
            choice = self.within(limit)
            before = self._costs(choice)
            self.variants(choice)
            if before == self._costs(choice):
                return choice
            del self.front

    def variants(self, choice: SharedChoice) -> tuple[Variant, ...]:
        """The compiled plan of every call."""
        picked = zip(self.calls, choice.plans, strict=True)
        return tuple(self.plans[call.graph].variant(number) for call, number in picked)

    def alone(self, options: Options) -> SharedChoice:
        """The step in which every graph is planned by itself, as it is without a budget."""
        picked = {}
        for graph, plans in self.plans.items():
            found = choose(plans.candidates, options, unplanned=plans.kept)
            picked[graph] = plans.candidates.index(found)
        numbers = tuple(picked[call.graph] for call in self.calls)
        choice = SharedChoice(numbers, self.peak(numbers), 0.0)
        return dataclasses.replace(choice, seconds=sum(cost.seconds for cost in self._costs(choice)))

    def fits_without_plain(self, limit: int) -> bool:
        """Return whether the step is within so many bytes if plain code between the calls keeps nothing: how much less
        it can save is only known once it has run."""
        other = copy.copy(self)
        known = {block for call in self.calls for block in (*call.reads, *call.outputs) if block is not None}
        other._bytes = np.where([block in known for block in self._places], self._bytes, 0)
        return self.resident + min(other.peak(one.plans, returned=False) for one in self.front) <= limit

    def require_room(self, budget: Budget, limit: int, *, returned: bool = True) -> None:
        """Raise if no choice is within so many bytes."""
        peaks = [one.step_peak if returned else self.peak(one.plans, returned=False) for one in self.front]
        floor = self.resident + min(peaks)
        if floor <= limit and returned and self.footprint is not None:
            floor = min(map(self.taken, self.front))
        if floor <= limit:
            return
        if self.search():
            self.require_room(budget, limit, returned=returned)
            return
        lowest = self.front[peaks.index(min(peaks))]
        largest = max(range(len(self.calls)), key=lambda place: self._costs(lowest)[place].backward_peak)
        plan = self.plans[self.calls[largest].graph].candidates[lowest.plans[largest]].plan
        what = f"this step of {len(self.calls)} calls of {len(self.graphs)} graphs"
        raise budget_error(plan, budget, limit, floor, tiers=bool(self.options.tiers), what=what)

    def _costs(self, choice: SharedChoice) -> list[CallCosts]:
        return [self.plans[call.graph].costs[number] for call, number in zip(self.calls, choice.plans, strict=True)]

    # -- what a session takes ----------------------------------------------------------------------------

    def program(self, choice: SharedChoice, limit: int | None = None) -> Program:
        """The step as a program with these plans."""
        return Program(
            calls=self.numbers,
            shared=choice,
            variants=self.variants(choice),
            unplanned=self.unplanned,
            floor=self.floor,
            resident=self.resident,
            limit=limit,
            footprint=self.footprint,
            sharded=self._shards is not None,
        )

    def taken_over(self, graph: Graph, tangents: Tangents) -> RecordedGraph | None:
        """The recorded graph that a captured one equals, once."""
        found = next((one for one in self._left if one.is_same(graph, tangents)), None)
        if found is not None:
            self._left.remove(found)
        return found
