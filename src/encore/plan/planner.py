"""All plans of one graph: found on estimates, built in full only when one is looked at.

More methods never give a worse plan than fewer: with every set of methods within the one that is allowed a search is
made as if there were no other, and all its plans are candidates. The search with more goes on from where those with
fewer have ended.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from encore.codecs import Densities
from encore.fates import KINDS, Decision, Encode, Fate, Keep, Link, Offload, Recompute, Terms
from encore.fates.encode import LEAST_BYTES
from encore.graph import Graph
from encore.plan.admission import Admitted
from encore.plan.calls import CallCosts
from encore.plan.candidate import Candidate, Fuse, by_methods, worth_having
from encore.plan.gathered import remade
from encore.plan.methods import Methods
from encore.plan.patterns import PlanPattern, roles_of
from encore.plan.plan import Plan, feature_maps
from encore.plan.search import EVALUATED_OPS, MOST_EVALUATIONS, SMALLEST, Search
from encore.plan.seconds import ActionSeconds, step_seconds
from encore.plan.step_model import RoughPlan, StepModel
from encore.plan.strategies import STRATEGIES
from encore.schedule import CarriedOut, Schedule, carry_out_fates, place_transfers, schedule_step, simulate
from encore.schedule.simulator import Workspace

SMALL_GRAPH = 80
"""Operators up to which plans are built before they become candidates: an estimate of so few may be off by an
activation."""
MOST_BUILT = 60
"""Plans of a small graph that are built: a millisecond each."""
FAR = 1.4
"""How far the estimate of a small graph may be off."""
KEPT = "keeping it does not set the peak, or recomputing it costs more"
KEPT_INSTEAD = "kept instead of what is recomputed from it"


class Planner:
    """Makes the candidate plans of one graph whose kept plan is known."""

    def __init__(
        self,
        kept: Plan,
        workspace: Workspace,
        seconds: ActionSeconds,
        *,
        fuse: Fuse | None = None,
        exact: bool = True,
        keep: Collection[str] = (),
        methods: Methods | None = None,
        links: Mapping[str, Link] | None = None,
        densities: Densities | None = None,
        admitted: Admitted | None = None,
        gathered: bool = False,
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
        self.methods = methods or Methods()
        self.links = links or {}
        """The tiers that feature maps may go to, by name."""
        self.densities = densities or {}
        """What is known of the data."""
        self.admitted = admitted
        """The lossy codecs that it may use, and for which activations; None: all of its methods, for any."""
        self.remade: frozenset[Fate] = remade(self.graph) if gathered else frozenset()
        """What becomes of values that are made of weights alone, if these are only there while they are used."""
        self.calls = 1
        """Calls of this graph whose saved bytes are there together."""
        self.reference: Planner = self if reference is None else reference.reference
        """The planner of the first form of the graph, which overheads are relative to."""

    def informed(
        self,
        *,
        links: Mapping[str, Link] | None = None,
        densities: Densities | None = None,
        admitted: Admitted | None = None,
        calls: int | None = None,
        seconds: ActionSeconds | None = None,
    ) -> Planner:
        """A planner of the same graph that knows more; what is not given stays as it is."""
        known = copy.copy(self)
        known.links = self.links if links is None else links
        known.densities = self.densities if densities is None else densities
        known.admitted = self.admitted if admitted is None else admitted
        known.calls = self.calls if calls is None else calls
        if seconds is not None:
            known.seconds = seconds
            known.__dict__.pop("kept_seconds", None)
        known.reference = known if self.reference is self else self.reference
        return known

    def is_large(self, value: int) -> bool:
        """Return whether the size of a value matters to the peak."""
        return self.graph.bytes_of(value) >= max(LEAST_BYTES, SMALLEST * self.kept.timeline.step_peak)

    @functools.cached_property
    def kept_seconds(self) -> float:
        return step_seconds(self.runs.schedule, self.seconds)

    @property
    def graph(self) -> Graph:
        return self.kept.schedule.graph

    def candidate_plans(self) -> list[Candidate]:
        """From the fastest, which keeps everything, to the smallest."""
        built = self._is_built
        searched = (
            (rough, {methods})
            for methods, search in self._searches()
            for rough in (spread(search.within_reach(FAR), MOST_BUILT) if built else search.pareto())
        )
        return self._candidates_of(searched)

    def carried_plans(self, patterns: Iterable[PlanPattern]) -> list[Candidate]:
        """The plans of other graphs of this structure, and of this form, for this one; nothing is searched."""
        mine = [one for one in patterns if (one.lean, one.slices) == (self.kept.lean, self.kept.slices)]
        model, values_of = self._step_model(), roles_of(self.graph)
        if not all(one.only_recomputes for one in mine):
            labels = set().union(*(one.labels for one in mine))
            codecs = tuple(name for name in self.methods.codecs if any(name in label.split() for label in labels))
            methods = dataclasses.replace(self._allowed_methods, codecs=codecs)
            model.add_candidates(self.candidates(model.open_values - self.frozen, methods, labels))
        carried = []
        for one in mine:
            chosen = model.numbers(one.recomputed(values_of), one.others(values_of, model.candidates))
            carried.append((model.evaluate(chosen), one.found_with))
        return self._candidates_of(carried)

    @property
    def _is_built(self) -> bool:
        """Whether plans are built before they become candidates."""
        return self.fuse is None and len(self.graph.ops) <= SMALL_GRAPH

    def _candidates_of(self, found: Iterable[tuple[RoughPlan, Collection[Methods]]]) -> list[Candidate]:
        """Keeping everything, and these plans, with the methods that they were found with."""
        candidates: dict[object, Candidate] = {}
        for rough, found_with in found:
            fates = rough.fates
            if fates:
                key = fates if self._is_built else (fates, rough.peak, rough.seconds)
                if key not in candidates:
                    candidates[key] = self.given(fates) if self._is_built else self._rough_candidate(rough)
                candidates[key].found_with.update(found_with)
        return [self.as_it_is(), *candidates.values()]

    def _step_model(self) -> StepModel:
        return StepModel(
            self.runs.schedule,
            self.runs.timeline,
            self.seconds,
            fused=self.fuse is not None,
            frozen=self.frozen,
            calls=self.calls,
        )

    @property
    def _allowed_methods(self) -> Methods:
        """What it may do, offloading included if there are tiers."""
        return dataclasses.replace(self.methods, kinds=self.methods.kinds.union([Offload.kind] if self.links else ()))

    def _searches(self) -> Iterator[tuple[Methods, Search]]:
        """One for every set of methods that makes a difference, each with what those before have found."""
        whole = self._step_model()
        large = len(self.graph.ops) * MOST_EVALUATIONS > EVALUATED_OPS
        done: list[tuple[Methods, Search]] = []
        for methods in self._allowed_methods.narrower():
            model = whole.for_choices(recompute=Recompute.kind in methods.kinds)
            model.add_candidates(self.candidates(model.open_values - self.frozen, methods))
            narrower = [search for other, search in done if other.within(methods)]
            if not model.has_more_than(search.model for search in narrower):
                continue
            proposed = self.proposed if model.droppable and not (large and narrower) else ()
            search = Search(model, narrower)
            search.run(model.numbers(values) for values in proposed)
            done.append((methods, search))
            yield methods, search

    @functools.cached_property
    def proposed(self) -> list[frozenset[int]]:
        """By strategies."""
        return [strategy(self.graph) for strategy in STRATEGIES.values()]

    def candidates(
        self, values: Collection[int], methods: Methods, labels: Collection[str] | None = None
    ) -> list[Fate]:
        """The fates that are worth trying for these values; of these labels, if they are given."""
        known = self.densities, self.admitted, self.links, labels, self.exact
        terms = Terms(self.seconds, self.workspace, methods.codecs, *known)
        found: list[Fate] = []
        for name, kind in KINDS.items():
            if name in methods.kinds or name == Encode.kind:
                found += kind.candidates(self.graph, values, terms, found)
        return found

    def as_it_is(self) -> Candidate:
        """Keeping everything."""
        if self.reference is self:
            return Candidate(self._peak(self.runs), 0.0, build=lambda: self.kept, fuse=lambda plan: self.runs)
        return self.candidate(frozenset(), self._peak(self.runs), self._overhead(self.kept_seconds))

    def _rough_candidate(self, rough: RoughPlan) -> Candidate:
        return self.candidate(rough.fates, rough.peak, self._overhead(self.kept_seconds + rough.seconds))

    def _peak(self, plan: Plan) -> int:
        """The peak of a plan, on top of what other calls save."""
        others = self.calls - 1
        return plan.timeline.step_peak + (others * CallCosts.of(plan).saved if others else 0)

    def _overhead(self, seconds: float) -> float:
        return max(0.0, seconds / self.reference.kept_seconds - 1)

    def given(self, fates: frozenset[Fate]) -> Candidate:
        """A plan that was made elsewhere."""
        plan = self._fuse_and_time(self.plan(fates))
        return self.candidate(fates, self._peak(plan), self._overhead(plan.seconds or self.kept_seconds))

    def candidate(self, fates: frozenset[Fate], step_peak: int, overhead: float) -> Candidate:
        """The plan that carries out these fates."""
        form = self.kept
        return Candidate(
            step_peak, overhead, lambda: self.plan(fates), self._fuse_and_time,
            fates=fates, slices=form.slices, lean=form.lean,
        )  # fmt: skip

    def plan(self, fates: frozenset[Fate]) -> Plan:
        """The plan that carries out these fates, as separate operators."""
        if not fates:
            return self.kept
        if self.remade:
            weights = {fate.value for fate in self.remade}
            fates = self.remade.union(fate for fate in fates if fate.value not in weights)
        carried_out = carry_out_fates(self.graph, fates, exact=self.exact)
        schedule = schedule_step(carried_out.graph)
        plan = Plan(
            name=_name(fates),
            decisions=self._decisions(schedule, fates, carried_out),
            schedule=schedule,
            timeline=simulate(schedule, self.workspace, outputs_outlive=self.kept.timeline.outputs_outlive),
            fates=fates,
            slices=self.kept.slices,
            lean=self.kept.lean,
        )
        return plan if self.fuse is not None else self.timed(plan)

    def _fuse_and_time(self, plan: Plan) -> Plan:
        return plan if self.fuse is None else self.timed(self.fuse(plan))

    def timed(self, plan: Plan) -> Plan:
        """A plan with its seconds, its transfers during its operators."""
        if not plan.tiers:
            return dataclasses.replace(plan, seconds=step_seconds(plan.schedule, self.seconds))
        placed = place_transfers(plan.schedule, plan.timeline, self.seconds, self.links)
        timeline = simulate(placed.schedule, self.workspace, outputs_outlive=plan.timeline.outputs_outlive)
        assert timeline.step_peak <= plan.timeline.step_peak, "transfers in flight have raised the peak"
        return dataclasses.replace(
            plan,
            schedule=placed.schedule,
            timeline=timeline,
            seconds=step_seconds(placed.schedule, self.seconds) + placed.lost + placed.stall,
            stall=placed.stall,
            moved=placed.moved,
        )

    def _decisions(self, schedule: Schedule, fates: frozenset[Fate], carried_out: CarriedOut) -> Mapping[int, Decision]:
        graph, before = schedule.graph, self.kept.decisions
        decided: dict[int, Decision] = {}
        for fate in sorted(fates, key=lambda fate: fate.value):
            ops = carried_out.ops.get(fate.value, ())
            decided.update(fate.decisions(self.graph, graph, ops, self.seconds))
        instead = {op.writes[0] for ops in carried_out.ops.values() for op in ops if op.forward}
        saved = {value for value in feature_maps(schedule) if value not in instead}
        decisions: dict[int, Decision] = {}
        for value in dict.fromkeys((*before, *sorted(decided), *sorted(saved))):
            if value in decided:
                decisions[value] = decided[value]
            elif value not in saved:
                maker, again = self.graph.producer(value), Recompute(value)
                decisions[value] = Decision(again, again.why, 0.0 if maker is None else self.seconds(self.graph, maker))
            else:
                why = KEPT if value in before else KEPT_INSTEAD
                decisions[value] = Decision(Keep(value), why, held=graph.bytes_of(value))
        return decisions


def spread(plans: Sequence[RoughPlan], most: int) -> list[RoughPlan]:
    """At most so many of the plans, from the first to the last."""
    return [plans[number * len(plans) // most] for number in range(most)] if len(plans) > most else [*plans]


def candidates_of(
    planners: Iterable[Planner],
    may_win: Callable[[Planner, Sequence[Candidate]], bool] = lambda form, found: True,
    candidate_plans: Callable[[Planner], list[Candidate]] | None = None,
) -> list[Candidate]:
    """The candidates of several forms of one graph, the form as it is first: of every set of methods each that is worth
    having. A form that cannot win against what was found before is not searched. `candidate_plans` takes the place of
    a search."""
    every: list[Candidate] = []
    for planner in planners:
        if not every or may_win(planner, every):
            every += planner.candidate_plans() if candidate_plans is None else candidate_plans(planner)
    as_it_is, *found = every
    worth = [candidate for searched in by_methods([as_it_is, *found]) for candidate in worth_having(searched)]
    return [as_it_is, *sorted(set(worth) - {as_it_is}, key=lambda candidate: (candidate.overhead, candidate.step_peak))]


def _name(fates: Collection[Fate]) -> str:
    """What a plan does, in a word or three."""
    kinds = {one.kind for fate in fates for one in (fate, *fate.also)}
    return " and ".join(name for name in KINDS if name in kinds)


def _matching(graph: Graph, patterns: Collection[str]) -> frozenset[int]:
    """Values made by modules that the user wants kept."""
    return frozenset(
        value
        for op in graph.ops
        if any(fnmatch.fnmatchcase(op.module, pattern) for pattern in patterns)
        for value in op.writes
        if value is not None
    )
