"""The plans of a graph for the calls of a step: what each takes, and the callables that run it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from encore.compiler.variants import Variant
from encore.options import Lossy
from encore.plan import Candidate, GraphPlan, Plan, worth_having
from encore.plan.calls import CallCosts

MOST_PLANS = 7
"""Plans that are built of each search: from the fastest to the smallest."""
LOOKED_AT = 3
"""Of these, the smallest: their order is nearly that of their peaks."""


@dataclass(frozen=True, slots=True)
class Offers:
    """The candidates of one graph."""

    candidates: Sequence[Candidate]
    seconds: float
    """What a call takes with everything kept."""
    build: Callable[[Candidate], Variant]
    """Compiles a candidate."""
    given: Callable[[GraphPlan], tuple[Candidate, Callable[[Candidate], Variant]]]
    """The candidate for a plan that was made elsewhere, and what compiles it."""


class CallPlans:
    """The candidates of one graph that no other candidate beats in saved bytes, peaks and seconds."""

    def __init__(self, kept: Plan, offers: Offers, search: Callable[[], Offers] | None = None) -> None:
        """`search` finds other candidates, if these were carried over from other sizes."""
        self.kept = kept
        """The plan that changes nothing."""
        self._search = search
        self._take(offers)

    def search(self) -> bool:
        """Search the graph, if its plans were carried over from other sizes; return whether they were. Its plans have
        other numbers then."""
        search, self._search = self._search, None
        if search is not None:
            self._take(search())
        return search is not None

    def _take(self, offers: Offers) -> None:
        seconds = offers.seconds
        self.unplanned = CallCosts.of(self.kept, seconds)
        self._offers = offers
        self._added: dict[Candidate, Callable[[Candidate], Variant]] = {}
        candidates = dict.fromkeys(offers.candidates)
        looked_at = [(CallCosts.of(one.plan, seconds * (1 + one.overhead)), one) for one in candidates]
        worth: list[tuple[CallCosts, Candidate]] = []
        for cost, candidate in looked_at:
            if not any(other.dominates(cost) for other, _ in worth):
                worth = [(other, its) for other, its in worth if not cost.dominates(other)]
                worth.append((cost, candidate))
        self.costs = [cost for cost, _ in worth]
        """What each plan takes, with its kernels as they were compiled once its callables are built."""
        self.candidates = [candidate for _, candidate in worth]
        self.variant = functools.cache(self._variant)
        """The callables of a plan, by its number."""

    @property
    def fingerprint(self) -> str:
        """A name for the graph."""
        return GraphPlan.of(self.kept.schedule.graph, self.kept).fingerprint

    def graph_plan(self, number: int) -> GraphPlan:
        """A plan as other processes can take it over."""
        return GraphPlan.of(self.kept.schedule.graph, self.candidates[number].separate)

    def add(self, plan: GraphPlan) -> int:
        """Add a plan that was made elsewhere; return its number."""
        candidate, build = self._offers.given(plan)
        self._added[candidate] = build
        self.candidates.append(candidate)
        self.costs.append(CallCosts.of(candidate.plan, self._offers.seconds * (1 + candidate.overhead)))
        return len(self.costs) - 1

    @property
    def leanest(self) -> int:
        """The plan that takes least if its saved bytes count as much as its peak."""
        return min(range(len(self.costs)), key=lambda number: _size(self.costs[number]))

    @property
    def smallest(self) -> int:
        """The plan with the lowest peak of one call."""
        return min(range(len(self.costs)), key=lambda number: self.costs[number].peak)

    def _variant(self, number: int) -> Variant:
        candidate = self.candidates[number]
        variant = self._added.get(candidate, self._offers.build)(candidate)
        self.costs[number] = CallCosts.of(variant.captured.plan, self.costs[number].seconds)
        return variant


def _size(cost: CallCosts) -> tuple[int, float]:
    return cost.saved + cost.peak, cost.seconds


def few(candidates: Sequence[Candidate]) -> list[Candidate]:
    """A few of the candidates of one search, the fastest and the smallest among them."""
    worth = worth_having(candidates)
    smallest = sorted(candidates, key=lambda one: (one.step_peak, one.overhead))[:LOOKED_AT]
    count = min(MOST_PLANS - LOOKED_AT, len(worth))
    between = [worth[number * (len(worth) - 1) // max(1, count - 1)] for number in range(count)]
    return list(dict.fromkeys([candidates[0], *between, *smallest]))


def unbounded(lossy: Lossy) -> Lossy:
    """The lossy codecs that may be used without measuring their effect on the gradients of a whole step."""
    return Lossy() if lossy.bound is not None else lossy
