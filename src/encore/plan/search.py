"""From one step to all its plans: the Pareto set of peak against time, found by going downhill from several starts.

Each move drops one role (or every second value of it, or a role with the heavy values that only it would keep alive),
or gives it another fate, and is judged by what it takes off the peak where the peak now is, per second it costs.
The best move by that account is tried in outline; it stays if the peak falls. Starts are the kept step, the steps in
which all that can be is stood in for, in memory or in tiers, and what the strategies propose: from a step cut into
blocks the search reaches peaks that no sequence of single drops leads to. A search also goes on from what others have
found with fewer methods. Afterwards each plan is relieved of drops that its peak does not need, or that another
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
from encore.plan.sketch import Outline, Sketch

TRIES = 10
"""Moves that are tried at one place before the search takes it for the bottom."""
PARTS = (0.25, 0.5, 0.75)
"""Parts of a role that are tried by themselves, for plans in between."""
SMALLEST = 1e-3
"""Roles that hold less than this share of the peak are kept: a normalisation's statistics, a count."""
WORTH_PARTS = 0.04
"""Share of the kept peak that a move must take off for its parts to be looked at."""
SAMPLE = 8
"""Values of a role that stand for all of it when a move is judged."""
EVERY_CHOICE = 512
"""Choices up to which all of them are tried: so many outlines of a small graph take some 20 ms."""
MOST_OUTLINES = 400
EVALUATED_OPS = 1_000_000
"""Outlines are limited so that graphs of ten thousand operators are planned in a few seconds."""


@dataclass(frozen=True, slots=True)
class _Move:
    values: frozenset[int]
    gain: int
    cost: float


class Search:
    def __init__(self, sketch: Sketch, narrower: Sequence[Search] = ()) -> None:
        """`narrower` are searches of the same step, done before with fewer methods: this one goes on from there."""
        self.sketch = sketch
        self.narrower = narrower
        least = SMALLEST * int(sketch.profile.max())
        self.groups = [
            group
            for group in by_role(sketch.graph, sketch.droppable - sketch.melting)
            if sum(sketch.size[value] for value in group) >= least
        ]
        self.ways = _ways(sketch)
        """By value: the numbers of the fates that it may have."""
        self.candidates = [
            numbers for numbers in self._by_role() if sum(self._saved_by(number) for number in numbers) >= least
        ]
        """Fates of one label, a role each."""
        self.found: dict[frozenset[int], Outline] = {}
        for search in narrower:
            self.found.update(search.outlines_for(sketch))
        self.left = max(60, min(MOST_OUTLINES, EVALUATED_OPS // max(1, len(sketch.graph.ops))))
        self.kept = self.outline(frozenset())

    def _by_role(self) -> Iterator[tuple[int, ...]]:
        """The fates of all values of a role, one label after the other."""
        for group in by_role(self.sketch.graph, self.ways):
            kinds: dict[str, list[int]] = {}
            for value in group:
                for number in self.ways[value]:
                    kinds.setdefault(self._fate(number).label, []).append(number)
            yield from (tuple(numbers) for numbers in kinds.values())

    def _fate(self, number: int) -> Fate:
        found = self.sketch.fate(number)
        assert found is not None
        return found

    def _saved_by(self, number: int) -> int:
        """Bytes that a fate takes less than keeping."""
        return sum(self.sketch.size[value] - size for value, size in self._fate(number).shrinks)

    def outline(self, chosen: frozenset[int]) -> Outline:
        if chosen not in self.found:
            self.left -= 1
            self.found[chosen] = self.sketch.outline(chosen)
        return self.found[chosen]

    def run(self, starts: Iterable[frozenset[int]]) -> list[Outline]:
        """The plans worth having, from the fastest to the smallest; `starts` are choices by number."""
        options = self._options()
        if math.prod(map(len, options)) <= EVERY_CHOICE:
            for choice in itertools.product(*options):
                self.outline(frozenset(itertools.chain.from_iterable(choice)))
            return self.pareto()
        begun = [self.kept, *(self.outline(start) for start in starts)]
        for search in self.narrower:
            outlines = [self.outline(self.sketch.numbers(*search.chosen(outline))) for outline in search.pareto()]
            begun.append(outlines[-1])
        for moved in (True, False):
            everything = self._smallest_fates(moved=moved)
            if self.candidates and everything:
                begun.insert(1, self.outline(everything))
        share = self.left // (len(begun) + 1)
        for outline in begun:
            self._descend(outline, until=self.left - share)
        for outline in self.pareto():
            self._relieve(outline)
        return self.pareto()

    def _options(self) -> list[list[tuple[int, ...]]]:
        """For every value that could go: to keep it, or one of the numbers by which it goes."""
        droppable = self.sketch.droppable - self.sketch.melting
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
        if not self.sketch.candidates:
            return chosen | more
        decided = {target for number in more for target in self._targets(number)}
        return more.union(number for number in chosen if decided.isdisjoint(self._targets(number)))

    def _targets(self, number: int) -> tuple[int, ...]:
        one = self.sketch.fate(number)
        return (number,) if one is None else one.targets

    def outlines_for(self, sketch: Sketch) -> dict[frozenset[int], Outline]:
        """What was found here, by the numbers of a sketch on which there is more to choose from."""
        if self.sketch.droppable != sketch.droppable:  # values that are made again on the way differ
            return {}
        number_of = {one: number for number, one in enumerate(sketch.candidates, sketch.first_candidate)}
        renumbered = {
            number: number_of.get(one) for number, one in enumerate(self.sketch.candidates, self.sketch.first_candidate)
        }
        found = {}
        for outline in self.found.values():
            numbers = [renumbered.get(number, number) for number in outline.chosen]
            chosen = frozenset(number for number in numbers if number is not None)
            if len(chosen) == len(numbers):
                found[chosen] = dataclasses.replace(outline, chosen=chosen)
        return found

    def chosen(self, outline: Outline) -> tuple[list[int], list[Fate]]:
        """The values that an outline was chosen to recompute, and the other fates."""
        fates = [one for number in outline.chosen if (one := self.sketch.fate(number)) is not None]
        return [number for number in outline.chosen if number < self.sketch.first_candidate], fates

    def pareto(self) -> list[Outline]:
        best: list[Outline] = []
        for outline in sorted(self.found.values(), key=lambda one: (one.seconds, one.peak, len(one.chosen))):
            if not best or outline.peak < best[-1].peak:
                best.append(outline)
        return best

    def within_reach(self, margin: float) -> list[Outline]:
        """What would be worth having if outlines were off by this margin, the fastest first; one of every plan."""
        reached: dict[frozenset[Fate], Outline] = {}
        lowest = float("inf")
        for outline in sorted(self.found.values(), key=lambda one: (one.seconds, one.peak, len(one.chosen))):
            if outline.peak < margin * lowest:
                reached.setdefault(outline.fates, outline)
            lowest = min(lowest, outline.peak)
        return list(reached.values())

    # -- down --------------------------------------------------------------------------------------------------------

    def _descend(self, outline: Outline, until: int) -> None:
        useless: set[frozenset[int]] = set()
        while self.left > until:
            for move in self._moves(outline, useless)[:TRIES]:
                lower = self.outline(self._with(outline.chosen, move.values))
                if lower.peak <= (1 - SMALLEST) * outline.peak:
                    self._look_between(outline, lower, move)
                    outline = lower
                    useless.clear()
                    break
                useless.add(move.values)
            else:
                return

    def _look_between(self, above: Outline, below: Outline, move: _Move) -> None:
        """A part of the move, for budgets between the two."""
        if above.peak - below.peak < WORTH_PARTS * self.kept.peak:
            return
        ordered = sorted(move.values)
        for part in PARTS:
            some = frozenset(ordered[: int(part * len(ordered))])
            if some:
                self.outline(self._with(above.chosen, some))

    def _moves(self, outline: Outline, useless: set[frozenset[int]]) -> list[_Move]:
        """Every role that is alive at the worst moment, the most bytes a second first."""
        moves = [move for group in self.groups for move in self._drops(outline, group) if move.values not in useless]
        for numbers in self.candidates:
            moves += (move for move in self._replacements(outline, numbers) if move.values not in useless)
        return sorted(moves, key=lambda move: (-move.gain / (move.cost + 1e-7), min(move.values)))

    def _drops(self, outline: Outline, group: Sequence[int]) -> Iterator[_Move]:
        fresh = frozenset(value for value in group if value not in outline.chosen)
        if not fresh:
            return
        halves = [frozenset(sorted(fresh)[start::2]) for start in (0, 1)] if len(fresh) > 1 else []
        for values in dict.fromkeys((fresh, self._with_sources(outline, fresh), *halves)):
            gain, cost = self._account(outline, values)
            if gain > 0:
                yield _Move(values, gain, cost)

    def _replacements(self, outline: Outline, numbers: Sequence[int]) -> Iterator[_Move]:
        """The fates of one role, or every second of them."""
        fresh = frozenset(number for number in numbers if number not in outline.chosen)
        halves = [frozenset(sorted(fresh)[start::2]) for start in (0, 1)] if len(fresh) > 1 else []
        for some in (fresh, *halves):
            gain, cost = 0, 0.0
            for number in some:
                one = self._fate(number)
                if any(self._alive(outline, value) for value in one.targets):
                    gain += self._saved_by(number)
                cost += one.seconds
            if gain > 0:
                yield _Move(some, gain, cost)

    def _account(self, outline: Outline, values: frozenset[int]) -> tuple[int, float]:
        """Bytes at the worst moment that dropping takes away, less those that it keeps alive instead; its seconds."""
        sketch, worst = self.sketch, outline.worst
        gain, cost = 0, 0.0
        extended: set[int] = set()
        sample = sorted(values)[:: max(1, len(values) // SAMPLE)]
        for value in sample:
            if self._alive(outline, value):
                gain += sketch.size[value]
            elif value in outline.restored and sketch.made_at[value] <= worst:
                gain += outline.restored[value].held
            cost += sketch.cost[value]
            pending = list(sketch.inputs[value])
            seen = set()
            while pending:
                source = pending.pop()
                if source in seen or source not in sketch.made_at:
                    continue
                seen.add(source)
                again = source in values
                if not again and source in outline.restored:
                    cost += outline.restored[source].restore_seconds
                elif again or source in outline.chosen or source in sketch.melting:
                    if not again:
                        cost += sketch.melted[source] if sketch.light[source] else sketch.cost[source]
                    if not sketch.heavy[source]:
                        pending += sketch.inputs[source]
                elif source not in extended and not self._alive(outline, source) and sketch.made_at[source] <= worst:
                    extended.add(source)
                    gain -= sketch.size[source]
        share = len(values) / len(sample)
        return int(gain * share), cost * share

    def _with_sources(self, outline: Outline, values: frozenset[int]) -> frozenset[int]:
        """The values and whatever is not kept now that they would be recomputed from."""
        sketch = self.sketch
        taken = set(values)
        pending = [source for value in values for source in sketch.inputs[value]]
        while pending:
            source = pending.pop()
            if source in taken or source not in sketch.droppable or source in outline.last_use:
                continue
            if source in outline.restored:
                continue
            taken.add(source)
            pending += sketch.inputs[source]
        return frozenset(taken - sketch.melting)

    def _alive(self, outline: Outline, value: int) -> bool:
        last = outline.last_use.get(value)
        return last is not None and self.sketch.made_at[value] <= outline.worst <= last

    # -- back up -----------------------------------------------------------------------------------------------------

    def _relieve(self, outline: Outline) -> None:
        """Keep again what the peak does not need gone, the dearest first; else find a faster fate."""
        groups = [*self.groups, *self.candidates]
        costly = sorted(
            (group for group in groups if outline.chosen.intersection(group)),
            key=lambda group: -sum(self._cost(number) for number in group if number in outline.chosen),
        )
        for group in costly[:TRIES]:
            gone = outline.chosen.intersection(group)
            for instead in (frozenset[int](), *self._others(group, gone)):
                if self.left <= 0:
                    return
                other = self.outline(self._with(outline.chosen - gone, instead))
                if other.peak <= outline.peak and other.seconds < outline.seconds:
                    outline = other
                    break

    def _cost(self, number: int) -> float:
        one = self.sketch.fate(number)
        return self.sketch.cost[number] if one is None else one.seconds

    def _others(self, group: Sequence[int], gone: frozenset[int]) -> list[frozenset[int]]:
        """Other fates of these: for all of them, one label each."""
        kinds: dict[str, set[int]] = {}
        values = {target for number in gone for target in self._targets(number)}
        for value in values:
            for number in self.ways.get(value, ()):
                kinds.setdefault(self._fate(number).label, set()).add(number)
        return [frozenset(numbers) for numbers in kinds.values() if not numbers <= gone]


def _ways(sketch: Sketch) -> dict[int, list[int]]:
    """By value: the numbers of the fates that it may have."""
    ways: dict[int, list[int]] = {}
    for number, one in enumerate(sketch.candidates, sketch.first_candidate):
        ways.setdefault(one.targets[0], []).append(number)
    return ways
