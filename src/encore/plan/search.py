"""From one step to all its plans: the Pareto set of peak against time, found by going downhill from several starts.

Each move drops one role (or every second value of it, or a role with the heavy values that only it would keep alive)
and is judged by what it takes off the peak where the peak now is, per second it costs. The best move by that account is
tried in outline; it stays if the peak falls. Starts are the kept step and what the strategies propose: from a step cut
into blocks the search reaches peaks that no sequence of single drops leads to. Afterwards each plan is relieved of
drops that its peak does not need. The budget only picks from the set, so a larger one never gets a slower plan.
Where there are only a few feature maps, every choice is tried instead.

Nothing here depends on the clock: the same graph and the same costs give the same plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from encore.plan.roles import roles
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
EVERY_CHOICE = 9
"""Values up to which every choice of them is tried: 512 outlines of a small graph take some 20 ms."""
MOST_OUTLINES = 400
EVALUATED_OPS = 1_000_000
"""Outlines are limited so that graphs of ten thousand operators are planned in a few seconds."""


@dataclass(frozen=True, slots=True)
class _Move:
    values: frozenset[int]
    gain: int
    cost: float


class Search:
    def __init__(self, sketch: Sketch) -> None:
        self.sketch = sketch
        least = SMALLEST * int(sketch.profile.max())
        self.groups = [
            group
            for group in roles(sketch.graph, sketch.droppable - sketch.melting)
            if sum(sketch.size[value] for value in group) >= least
        ]
        self.found: dict[frozenset[int], Outline] = {}
        self.left = max(60, min(MOST_OUTLINES, EVALUATED_OPS // max(1, len(sketch.graph.ops))))
        self.kept = self.outline(frozenset())

    def outline(self, dropped: frozenset[int]) -> Outline:
        if dropped not in self.found:
            self.left -= 1
            self.found[dropped] = self.sketch.outline(dropped)
        return self.found[dropped]

    def run(self, starts: Iterable[frozenset[int]]) -> list[Outline]:
        """The plans worth having, from the fastest to the smallest."""
        values = sorted(self.sketch.droppable - self.sketch.melting)
        if len(values) <= EVERY_CHOICE:
            for size in range(1, len(values) + 1):
                for choice in itertools.combinations(values, size):
                    self.outline(frozenset(choice))
            return self.pareto()
        begun = [self.kept, *(self.outline(start & self.sketch.droppable) for start in starts)]
        share = self.left // (len(begun) + 1)
        for outline in begun:
            self._descend(outline, until=self.left - share)
        for outline in self.pareto():
            self._relieve(outline)
        return self.pareto()

    def pareto(self) -> list[Outline]:
        best: list[Outline] = []
        for outline in sorted(self.found.values(), key=lambda one: (one.seconds, one.peak, len(one.dropped))):
            if not best or outline.peak < best[-1].peak:
                best.append(outline)
        return best

    def within_reach(self, margin: float) -> list[Outline]:
        """What would be worth having if outlines were off by this margin, the fastest first; one of every plan."""
        reached: dict[frozenset[int], Outline] = {}
        lowest = float("inf")
        for outline in sorted(self.found.values(), key=lambda one: (one.seconds, one.peak, len(one.dropped))):
            if outline.peak < margin * lowest:
                reached.setdefault(outline.again, outline)
            lowest = min(lowest, outline.peak)
        return list(reached.values())

    # -- down --------------------------------------------------------------------------------------------------------

    def _descend(self, outline: Outline, until: int) -> None:
        useless: set[frozenset[int]] = set()
        while self.left > until:
            for move in self._moves(outline, useless)[:TRIES]:
                lower = self.outline(outline.dropped | move.values)
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
                self.outline(above.dropped | some)

    def _moves(self, outline: Outline, useless: set[frozenset[int]]) -> list[_Move]:
        """Every role that is alive at the worst moment, the most bytes a second first."""
        moves = [move for group in self.groups for move in self._drops(outline, group) if move.values not in useless]
        return sorted(moves, key=lambda move: (-move.gain / (move.cost + 1e-7), min(move.values)))

    def _drops(self, outline: Outline, group: Sequence[int]) -> Iterator[_Move]:
        fresh = frozenset(value for value in group if value not in outline.dropped)
        if not fresh:
            return
        halves = [frozenset(sorted(fresh)[start::2]) for start in (0, 1)] if len(fresh) > 1 else []
        for values in dict.fromkeys((fresh, self._with_sources(outline, fresh), *halves)):
            gain, cost = self._account(outline, values)
            if gain > 0:
                yield _Move(values, gain, cost)

    def _account(self, outline: Outline, values: frozenset[int]) -> tuple[int, float]:
        """Bytes at the worst moment that dropping takes away, less those that it keeps alive instead; its seconds."""
        sketch, worst = self.sketch, outline.worst
        gain, cost = 0, 0.0
        extended: set[int] = set()
        sample = sorted(values)[:: max(1, len(values) // SAMPLE)]
        for value in sample:
            if self._alive(outline, value):
                gain += sketch.size[value]
            cost += sketch.cost[value]
            pending = list(sketch.inputs[value])
            seen = set()
            while pending:
                source = pending.pop()
                if source in seen or source not in sketch.made_at:
                    continue
                seen.add(source)
                again = source in values
                if again or source in outline.dropped or source in sketch.melting:
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
            taken.add(source)
            pending += sketch.inputs[source]
        return frozenset(taken - sketch.melting)

    def _alive(self, outline: Outline, value: int) -> bool:
        last = outline.last_use.get(value)
        return last is not None and self.sketch.made_at[value] <= outline.worst <= last

    # -- back up -----------------------------------------------------------------------------------------------------

    def _relieve(self, outline: Outline) -> None:
        """Keep again what the peak does not need dropped, the dearest first."""
        costly = sorted(
            (group for group in self.groups if outline.dropped.intersection(group)),
            key=lambda group: -sum(self.sketch.cost[value] for value in group if value in outline.dropped),
        )
        for group in costly[:TRIES]:
            if self.left <= 0:
                return
            fewer = self.outline(outline.dropped - frozenset(group))
            if fewer.peak <= outline.peak and fewer.seconds < outline.seconds:
                outline = fewer
