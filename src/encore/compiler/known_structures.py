"""What a session has decided for the structures of its graphs, to be carried over to other sizes of them.

A batch of another length is another graph of the same structure. Its rewrites are judged as before, and the plans that
a search has found are carried over by role, scheduled and simulated for the new sizes, so that the choice among them is
made for this graph and its peak is exact. A search is made again where no carried plan fits the budget, where the one
that is chosen is far from what the last search reached, and where sizes differ by more than `RANGE` times.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from encore.graph import Graph
from encore.graph.structure import GraphStructure, structure_of
from encore.plan import Candidate, Planner, PlanPattern, roles_of
from encore.rewrite import KnownRatios

MOST_STRUCTURES = 64
"""Structures that a session remembers; those that were not used for the longest time are forgotten."""
MOST_SEARCHES = 4
"""Searches of one structure whose plans are carried over."""
RANGE = 4.0
"""How many times as large or small as in a searched graph a size may be."""
SLOWER, SLOWER_BY = 1.25, 0.05
"""How many times the overhead that was reached before a carried plan may have, and how much in addition."""
LARGER = 1.1
"""How many times the share of the peak that was reached before a carried plan may take."""


@dataclass(frozen=True, slots=True)
class FinishedSearch:
    """The plans that were found for one graph."""

    structure: GraphStructure
    patterns: tuple[PlanPattern, ...]
    reached: tuple[tuple[float, float], ...]
    """Of each plan: its peak as a share of that with everything kept, and its overhead."""

    @classmethod
    def of(cls, structure: GraphStructure, planners: Sequence[Planner], offers: Sequence[Candidate]) -> FinishedSearch:
        """What is to be known of a search of these forms of a graph."""
        roles = {(one.kept.lean, one.kept.slices): roles_of(one.graph) for one in planners}
        form = {(False, 1): roles_of(planners[0].graph)} | roles
        patterns = [PlanPattern.of(form[offer.lean, offer.slices], offer) for offer in offers[1:]]
        kept = offers[0].step_peak
        return cls(structure, tuple(patterns), tuple((one.step_peak / kept, one.overhead) for one in offers))

    def least_overhead(self, share: float) -> float:
        """The least overhead of the plans within a share of the peak."""
        return min((overhead for peak, overhead in self.reached if peak <= share), default=math.inf)

    def least_share(self, overhead: float) -> float:
        """The lowest peak within an overhead, as a share."""
        return min((peak for peak, its in self.reached if its <= overhead), default=1.0)


@dataclass
class KnownStructure:
    """What is known of the graphs of one structure."""

    ratios: KnownRatios = field(default_factory=KnownRatios)
    """How its rewrites were judged."""
    searches: list[FinishedSearch] = field(default_factory=list)

    def remember(self, search: FinishedSearch) -> None:
        """Add a search; one of the same sizes takes the place of the one before."""
        others = [one for one in self.searches if not one.structure.is_near(search.structure, 1.0)]
        self.searches = [*others, search][-MOST_SEARCHES:]

    def nearest(self, structure: GraphStructure) -> FinishedSearch | None:
        """The search of the nearest sizes; None if all are out of range."""
        within = [one for one in self.searches if one.structure.is_near(structure, RANGE)]
        return min(within, key=lambda one: one.structure.distance(structure), default=None)

    @property
    def patterns(self) -> list[PlanPattern]:
        """The plans of all searches."""
        return [pattern for search in self.searches for pattern in search.patterns]


class KnownStructures:
    """The structures of one session."""

    def __init__(self) -> None:
        self._known = OrderedDict[str, KnownStructure]()
        self._structures: weakref.WeakKeyDictionary[Graph, GraphStructure] = weakref.WeakKeyDictionary()

    def structure(self, graph: Graph) -> GraphStructure:
        """The structure of a captured graph."""
        found = self._structures.get(graph)
        if found is None:
            found = self._structures[graph] = structure_of(graph)
        return found

    def of(self, graph: Graph) -> KnownStructure:
        """What is known of the structure of a captured graph, so far."""
        key = self.structure(graph).key
        known = self._known.setdefault(key, KnownStructure())
        self._known.move_to_end(key)
        while len(self._known) > MOST_STRUCTURES:
            self._known.popitem(last=False)
        return known
