"""All plans of one graph: found in outline, built in full only when somebody looks at one."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Collection, Mapping, Sequence

from encore.graph import Graph
from encore.plan.decisions import Decision, Keep, Recompute
from encore.plan.offer import Fuse, Offer
from encore.plan.plan import Plan, feature_maps
from encore.plan.search import Search
from encore.plan.sketch import Outline, Seconds, Sketch
from encore.plan.strategies import STRATEGIES
from encore.schedule import Fused, Run, Schedule, schedule_step, simulate
from encore.schedule.recompute import recompute
from encore.schedule.simulate import Workspace

LEAST_GAIN = 0.02
"""A slower plan must take at least this share off the peak to be worth offering."""
SMALL_GRAPH = 80
"""Operators up to which plans are built before they are offered: an outline of so few may be off by a feature map."""
MOST_BUILT = 60
"""Plans of a small graph that are built: a millisecond each."""
FAR = 1.4
"""How far the outline of a small graph may be off."""


class Planner:
    """Makes the offers for one graph whose kept plan is known."""

    def __init__(
        self,
        kept: Plan,
        workspace: Workspace,
        seconds: Seconds,
        *,
        fuse: Fuse | None = None,
        exact: bool = True,
        keep: Collection[str] = (),
        reference: Planner | None = None,
    ) -> None:
        self.kept = kept
        self.workspace = workspace
        self.seconds = seconds
        self.fuse = fuse
        self.exact = exact
        self.runs = kept if fuse is None else fuse(kept)
        """The kept plan as it would run."""
        self.frozen = _matching(self.graph, keep)
        self.reference = reference or self
        """The planner of the graph as it is, where this one's has been rewritten to hold less."""

    @functools.cached_property
    def kept_seconds(self) -> float:
        return step_seconds(self.runs.schedule, self.seconds)

    @property
    def graph(self) -> Graph:
        return self.kept.schedule.graph

    def offers(self) -> list[Offer]:
        """From the fastest, which keeps everything, to the smallest."""
        sketch = Sketch(
            self.runs.schedule, self.runs.timeline, self.seconds, fused=self.fuse is not None, frozen=self.frozen
        )
        starts = [strategy(self.graph) for strategy in STRATEGIES.values()]
        search = Search(sketch)
        found = search.run(starts)
        if self.fuse is None and len(self.graph.ops) <= SMALL_GRAPH:
            reached = [outline for outline in search.within_reach(FAR) if outline.dropped]
            return [self.as_it_is(), *(self.given(outline.again) for outline in spread(reached, MOST_BUILT))]
        return [self.as_it_is(), *(self._offer(outline) for outline in found if outline.dropped)]

    def as_it_is(self) -> Offer:
        """Keeping everything."""
        if self.reference is self:
            return Offer(self.runs.timeline.step_peak, 0.0, build=lambda: self.kept, fuse=lambda plan: self.runs)
        return self.offer(frozenset(), self.runs.timeline.step_peak, self._overhead(self.kept_seconds))

    def _offer(self, outline: Outline) -> Offer:
        return self.offer(outline.again, outline.peak, self._overhead(self.kept_seconds + outline.seconds))

    def _overhead(self, seconds: float) -> float:
        return max(0.0, seconds / self.reference.kept_seconds - 1)

    def given(self, dropped: frozenset[int]) -> Offer:
        """A plan that somebody else has made."""
        plan = self._fuse_and_time(self.plan(dropped))
        return self.offer(dropped, plan.timeline.step_peak, self._overhead(plan.seconds or self.kept_seconds))

    def offer(self, dropped: frozenset[int], step_peak: int, overhead: float) -> Offer:
        """The plan that recomputes these values."""
        return Offer(step_peak, overhead, build=lambda: self.plan(dropped), fuse=self._fuse_and_time)

    def plan(self, dropped: frozenset[int]) -> Plan:
        """The plan that recomputes these values, as separate operators."""
        if not dropped:
            return self.kept
        graph = recompute(self.graph, dropped, exact=self.exact)
        schedule = schedule_step(graph)
        plan = Plan(
            name="recompute",
            decisions=self._decisions(schedule),
            schedule=schedule,
            timeline=simulate(schedule, self.workspace, outputs_outlive=self.kept.timeline.outputs_outlive),
            dropped=dropped,
            slices=self.kept.slices,
        )
        return plan if self.fuse is not None else self._timed(plan)

    def _fuse_and_time(self, plan: Plan) -> Plan:
        return plan if self.fuse is None else self._timed(self.fuse(plan))

    def _timed(self, plan: Plan) -> Plan:
        return dataclasses.replace(plan, seconds=step_seconds(plan.schedule, self.seconds))

    def _decisions(self, schedule: Schedule) -> Mapping[int, Decision]:
        before = self.kept.decisions
        decisions: dict[int, Decision] = {}
        saved = set(feature_maps(schedule))
        for value in dict.fromkeys((*before, *sorted(saved))):
            if value not in saved:
                maker = self.graph.producer(value)
                cost = 0.0 if maker is None else self.seconds(self.graph, maker)
                decisions[value] = Recompute("cheaper to compute again than to hold", cost)
            elif value in before:
                decisions[value] = Keep("holding it does not set the peak, or computing it again costs more")
            else:
                decisions[value] = Keep("kept instead of what is computed again from it")
        return decisions


def spread(outlines: Sequence[Outline], most: int) -> list[Outline]:
    """At most so many of the outlines, from the first to the last."""
    return [outlines[number * len(outlines) // most] for number in range(most)] if len(outlines) > most else [*outlines]


def menu(planners: Sequence[Planner]) -> list[Offer]:
    """The offers of several forms of one graph, the form as it is first: each slower, and worth it by what it takes
    off the peak."""
    offers = [planners[0].as_it_is()]
    found = [offer for planner in planners for offer in planner.offers()[planner is planners[0] :]]
    for offer in sorted(found, key=lambda offer: (offer.overhead, offer.step_peak)):
        if offer.step_peak <= (1 - LEAST_GAIN) * offers[-1].step_peak:
            offers.append(offer)
    return offers


def step_seconds(schedule: Schedule, seconds: Seconds) -> float:
    """What a step takes: the sum of its operators and kernels."""
    graph = schedule.graph
    total = 0.0
    for action in (*schedule.forward, *schedule.backward):
        if isinstance(action, Run):
            total += seconds(graph, graph.ops[action.op], action.over)
        elif isinstance(action, Fused):
            total += seconds(graph, action)
    return total


def _matching(graph: Graph, patterns: Collection[str]) -> frozenset[int]:
    """Values made by modules that the user wants left alone."""
    return frozenset(
        value
        for op in graph.ops
        if any(fnmatch.fnmatchcase(op.module, pattern) for pattern in patterns)
        for value in op.writes
        if value is not None
    )
