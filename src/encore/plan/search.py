"""From one step to all its plans: the Pareto set of peak against time, found by going downhill from several starts.

Each move drops one role (or every second value of it, or a role with the heavy values that only it would keep alive),
or gives it another fate, and is judged by what it takes off the peak where the peak now is, per second it costs.
The best move by that account is evaluated (`StepModel`); it stays if the peak falls. Starts are the kept step, the
steps in which all that can be is encoded, stashed or moved to tiers, and what the strategies propose: from a step cut
into blocks the search reaches peaks that no sequence of single drops leads to. A search also goes on from what others
have found with fewer methods. Afterwards each plan is relieved of drops that its peak does not need, or that another
fate serves faster. The budget only picks from the set, so a larger one never gets a slower plan. Where there are only
a few feature maps, every choice is tried instead.

Nothing here depends on the clock: the same graph and the same costs give the same plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from encore.fates import Fate
from encore.plan.roles import by_role
from encore.plan.step_model import RoughPlan, StepModel

TRIES = 10
"""Moves that are tried at one place before the search takes it for the bottom."""
PARTS = (0.25, 0.5, 0.75)
"""Parts of a role that are tried by themselves, for plans in between."""
SMALLEST = 1e-3
"""Roles that take less than this share of the peak are kept: a normalisation's statistics, a count."""
WORTH_PARTS = 0.04
"""Share of the kept peak that a move must take off for its parts to be looked at."""
SAMPLE = 8
"""Values of a role that stand for all of it when a move is judged."""
EVERY_CHOICE = 512
"""Choices up to which all of them are tried: so many evaluations of a small graph take some 20 ms."""
MOST_EVALUATIONS = 400
EVALUATED_OPS = 1_000_000
"""Evaluations are limited so that graphs of ten thousand operators are planned in a few seconds."""


@dataclass(frozen=True, slots=True)
class _Move:
    values: frozenset[int]
    gain: int
    cost: float


class Search:
    def __init__(self, model: StepModel, narrower: Sequence[Search] = ()) -> None:
        """`narrower` are searches of the same step, done before with fewer methods: this one goes on from there."""
        self.model = model
        self.narrower = narrower
        least = SMALLEST * int(model.profile.max())
        self.groups = [
            group
            for group in by_role(model.graph, model.droppable - model.melting)
            if sum(model.size[value] for value in group) >= least
        ]
        self.ways = _ways(model)
        """By value: the numbers of the fates that it may have."""
        self.candidates = [
            numbers for numbers in self._by_role() if sum(self._saved_by(number) for number in numbers) >= least
        ]
        """Fates of one label, a role each."""
        self.found: dict[frozenset[int], RoughPlan] = {}
        for search in narrower:
            self.found.update(search.found_for(model))
        self.left = max(60, min(MOST_EVALUATIONS, EVALUATED_OPS // max(1, len(model.graph.ops))))
        self.kept = self.evaluate(frozenset())

    def _by_role(self) -> Iterator[tuple[int, ...]]:
        """The fates of all values of a role, one label after the other."""
        for group in by_role(self.model.graph, self.ways):
            kinds: dict[str, list[int]] = {}
            for value in group:
                for number in self.ways[value]:
                    kinds.setdefault(self._fate(number).label, []).append(number)
            yield from (tuple(numbers) for numbers in kinds.values())

    def _fate(self, number: int) -> Fate:
        found = self.model.fate(number)
        assert found is not None
        return found

    def _saved_by(self, number: int) -> int:
        """Bytes that a fate takes less than keeping."""
        return sum(self.model.size[value] - size for value, size in self._fate(number).shrinks)

    def evaluate(self, chosen: frozenset[int]) -> RoughPlan:
        if chosen not in self.found:
            self.left -= 1
            self.found[chosen] = self.model.evaluate(chosen)
        return self.found[chosen]

    def run(self, starts: Iterable[frozenset[int]]) -> list[RoughPlan]:
        """The plans worth having, from the fastest to the smallest; `starts` are choices by number."""
        options = self._options()
        if math.prod(map(len, options)) <= EVERY_CHOICE:
            for choice in itertools.product(*options):
                self.evaluate(frozenset(itertools.chain.from_iterable(choice)))
            return self.pareto()
        begun = [self.kept, *(self.evaluate(start) for start in starts)]
        for search in self.narrower:
            found = [self.evaluate(self.model.numbers(*search.chosen(plan))) for plan in search.pareto()]
            begun.append(found[-1])
        for moved in (True, False):
            everything = self._smallest_fates(moved=moved)
            if self.candidates and everything:
                begun.insert(1, self.evaluate(everything))
        share = self.left // (len(begun) + 1)
        for plan in begun:
            self._descend(plan, until=self.left - share)
        for plan in self.pareto():
            self._relieve(plan)
        return self.pareto()

    def _options(self) -> list[list[tuple[int, ...]]]:
        """For every value that could go: to keep it, or one of the numbers by which it goes."""
        droppable = self.model.droppable - self.model.melting
        return [
            [(), *([(value,)] if value in droppable else []), *((number,) for number in self.ways.get(value, ()))]
            for value in sorted(droppable.union(self.ways))
        ]

    def _smallest_fates(self, *, moved: bool) -> frozenset[int]:
        """The fate that takes least, of every value that has one: in memory, or moved to a tier."""
        ways = (
            [number for number in numbers if bool(self._fate(number).tier) is moved] for numbers in self.ways.values()
        )
        return frozenset(
            max(numbers, key=lambda number: (self._saved_by(number), -number)) for numbers in ways if numbers
        )

    def _with(self, chosen: frozenset[int], more: frozenset[int]) -> frozenset[int]:
        """A choice with more in it: one value has one fate, and the latest counts."""
        if not self.model.candidates:
            return chosen | more
        decided = {target for number in more for target in self._targets(number)}
        return more.union(number for number in chosen if decided.isdisjoint(self._targets(number)))

    def _targets(self, number: int) -> tuple[int, ...]:
        one = self.model.fate(number)
        return (number,) if one is None else one.targets

    def found_for(self, model: StepModel) -> dict[frozenset[int], RoughPlan]:
        """What was found here, by the numbers of a model on which there is more to choose from."""
        if self.model.droppable != model.droppable:  # values that are recomputed on the way differ
            return {}
        number_of = {one: number for number, one in enumerate(model.candidates, model.first_candidate)}
        renumbered = {
            number: number_of.get(one) for number, one in enumerate(self.model.candidates, self.model.first_candidate)
        }
        found = {}
        for plan in self.found.values():
            numbers = [renumbered.get(number, number) for number in plan.chosen]
            chosen = frozenset(number for number in numbers if number is not None)
            if len(chosen) == len(numbers):
                found[chosen] = dataclasses.replace(plan, chosen=chosen)
        return found

    def chosen(self, plan: RoughPlan) -> tuple[list[int], list[Fate]]:
        """The values that a plan was chosen to recompute, and the other fates."""
        fates = [one for number in plan.chosen if (one := self.model.fate(number)) is not None]
        return [number for number in plan.chosen if number < self.model.first_candidate], fates

    def pareto(self) -> list[RoughPlan]:
        best: list[RoughPlan] = []
        for plan in sorted(self.found.values(), key=lambda one: (one.seconds, one.peak, len(one.chosen))):
            if not best or plan.peak < best[-1].peak:
                best.append(plan)
        return best

    def within_reach(self, margin: float) -> list[RoughPlan]:
        """What would be worth having if estimates were off by this margin, the fastest first; one of every plan."""
        reached: dict[frozenset[Fate], RoughPlan] = {}
        lowest = float("inf")
        for plan in sorted(self.found.values(), key=lambda one: (one.seconds, one.peak, len(one.chosen))):
            if plan.peak < margin * lowest:
                reached.setdefault(plan.fates, plan)
            lowest = min(lowest, plan.peak)
        return list(reached.values())

    # -- down --------------------------------------------------------------------------------------------------------

    def _descend(self, plan: RoughPlan, until: int) -> None:
        useless: set[frozenset[int]] = set()
        while self.left > until:
            for move in self._moves(plan, useless)[:TRIES]:
                lower = self.evaluate(self._with(plan.chosen, move.values))
                if lower.peak <= (1 - SMALLEST) * plan.peak:
                    self._look_between(plan, lower, move)
                    plan = lower
                    useless.clear()
                    break
                useless.add(move.values)
            else:
                return

    def _look_between(self, above: RoughPlan, below: RoughPlan, move: _Move) -> None:
        """A part of the move, for budgets between the two."""
        if above.peak - below.peak < WORTH_PARTS * self.kept.peak:
            return
        ordered = sorted(move.values)
        for part in PARTS:
            some = frozenset(ordered[: int(part * len(ordered))])
            if some:
                self.evaluate(self._with(above.chosen, some))

    def _moves(self, plan: RoughPlan, useless: set[frozenset[int]]) -> list[_Move]:
        """Every role that is alive at the worst moment, the most bytes a second first."""
        moves = [move for group in self.groups for move in self._drops(plan, group) if move.values not in useless]
        for numbers in self.candidates:
            moves += (move for move in self._replacements(plan, numbers) if move.values not in useless)
        return sorted(moves, key=lambda move: (-move.gain / (move.cost + 1e-7), min(move.values)))

    def _drops(self, plan: RoughPlan, group: Sequence[int]) -> Iterator[_Move]:
        fresh = frozenset(value for value in group if value not in plan.chosen)
        if not fresh:
            return
        halves = [frozenset(sorted(fresh)[start::2]) for start in (0, 1)] if len(fresh) > 1 else []
        for values in dict.fromkeys((fresh, self._with_sources(plan, fresh), *halves)):
            gain, cost = self._account(plan, values)
            if gain > 0:
                yield _Move(values, gain, cost)

    def _replacements(self, plan: RoughPlan, numbers: Sequence[int]) -> Iterator[_Move]:
        """The fates of one role, or every second of them."""
        fresh = frozenset(number for number in numbers if number not in plan.chosen)
        halves = [frozenset(sorted(fresh)[start::2]) for start in (0, 1)] if len(fresh) > 1 else []
        for some in (fresh, *halves):
            gain, cost = 0, 0.0
            for number in some:
                one = self._fate(number)
                if any(self._alive(plan, value) for value in one.targets):
                    gain += self._saved_by(number)
                cost += one.seconds
            if gain > 0:
                yield _Move(some, gain, cost)

    def _account(self, plan: RoughPlan, values: frozenset[int]) -> tuple[int, float]:
        """Bytes at the worst moment that dropping takes away, less those that it keeps alive instead; its seconds."""
        model, worst = self.model, plan.worst
        gain, cost = 0, 0.0
        extended: set[int] = set()
        sample = sorted(values)[:: max(1, len(values) // SAMPLE)]
        for value in sample:
            if self._alive(plan, value):
                gain += model.size[value]
            elif value in plan.restored and model.made_at[value] <= worst:
                gain += plan.restored[value].held
            cost += model.cost[value]
            pending = list(model.inputs[value])
            seen = set()
            while pending:
                source = pending.pop()
                if source in seen or source not in model.made_at:
                    continue
                seen.add(source)
                again = source in values
                if not again and source in plan.restored:
                    cost += plan.restored[source].restore_seconds
                elif again or source in plan.chosen or source in model.melting:
                    if not again:
                        cost += model.melted[source] if model.light[source] else model.cost[source]
                    if not model.heavy[source]:
                        pending += model.inputs[source]
                elif source not in extended and not self._alive(plan, source) and model.made_at[source] <= worst:
                    extended.add(source)
                    gain -= model.size[source]
        share = len(values) / len(sample)
        return int(gain * share), cost * share

    def _with_sources(self, plan: RoughPlan, values: frozenset[int]) -> frozenset[int]:
        """The values and whatever is not kept now that they would be recomputed from."""
        model = self.model
        taken = set(values)
        pending = [source for value in values for source in model.inputs[value]]
        while pending:
            source = pending.pop()
            if source in taken or source not in model.droppable or source in plan.last_use:
                continue
            if source in plan.restored:
                continue
            taken.add(source)
            pending += model.inputs[source]
        return frozenset(taken - model.melting)

    def _alive(self, plan: RoughPlan, value: int) -> bool:
        last = plan.last_use.get(value)
        return last is not None and self.model.made_at[value] <= plan.worst <= last

    # -- back up -----------------------------------------------------------------------------------------------------

    def _relieve(self, plan: RoughPlan) -> None:
        """Keep again what the peak does not need gone, the dearest first; else find a faster fate."""
        groups = [*self.groups, *self.candidates]
        costly = sorted(
            (group for group in groups if plan.chosen.intersection(group)),
            key=lambda group: -sum(self._cost(number) for number in group if number in plan.chosen),
        )
        for group in costly[:TRIES]:
            gone = plan.chosen.intersection(group)
            for instead in (frozenset[int](), *self._others(group, gone)):
                if self.left <= 0:
                    return
                other = self.evaluate(self._with(plan.chosen - gone, instead))
                if other.peak <= plan.peak and other.seconds < plan.seconds:
                    plan = other
                    break

    def _cost(self, number: int) -> float:
        one = self.model.fate(number)
        return self.model.cost[number] if one is None else one.seconds

    def _others(self, group: Sequence[int], gone: frozenset[int]) -> list[frozenset[int]]:
        """Other fates of these: for all of them, one label each."""
        kinds: dict[str, set[int]] = {}
        values = {target for number in gone for target in self._targets(number)}
        for value in values:
            for number in self.ways.get(value, ()):
                kinds.setdefault(self._fate(number).label, set()).add(number)
        return [frozenset(numbers) for numbers in kinds.values() if not numbers <= gone]


def _ways(model: StepModel) -> dict[int, list[int]]:
    """By value: the numbers of the fates that it may have."""
    ways: dict[int, list[int]] = {}
    for number, one in enumerate(model.candidates, model.first_candidate):
        ways.setdefault(one.targets[0], []).append(number)
    return ways
