"""All plans of one graph: found in outline, built in full only when somebody looks at one.

Whoever may use more methods is never answered worse than whoever may use fewer: with every set of methods within the
one that is allowed a search is made as if there were no other, and its plans are all on offer. The search with more
goes on from where those with less have ended.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

from encore.codecs import CODECS, Codec, Densities
from encore.graph import Graph
from encore.graph.tier_ops import LoadFrom, StoreTo
from encore.plan.admission import Admitted
from encore.plan.calls import CallCosts
from encore.plan.decisions import Decision, Encode, Keep, Offload, Recompute, Stash
from encore.plan.offer import Fuse, Offer, by_methods, worth_having
from encore.plan.plan import Plan, feature_maps
from encore.plan.search import EVALUATED_OPS, MOST_OUTLINES, SMALLEST, Search
from encore.plan.sketch import Outline, Sketch
from encore.plan.stand_ins import LEAST_BYTES, Methods, Seconds, StandIn, encodings, offloads, stashes
from encore.plan.strategies import STRATEGIES
from encore.schedule import (
    KEEP_EVERYTHING,
    Choice,
    Fused,
    Link,
    Run,
    Schedule,
    Stashed,
    carry_out,
    place_transfers,
    schedule_step,
    simulate,
)
from encore.schedule.simulate import Workspace
from encore.schedule.stash import keep_less, recurrent

SMALL_GRAPH = 80
"""Operators up to which plans are built before they are offered: an outline of so few may be off by a feature map."""
MOST_BUILT = 60
"""Plans of a small graph that are built: a millisecond each."""
FAR = 1.4
"""How far the outline of a small graph may be off."""
ENCODERS = frozenset(codec.encode for codec in CODECS.values())
DECODERS = frozenset(codec.decode for codec in CODECS.values())


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
        methods: Methods | None = None,
        links: Mapping[str, Link] | None = None,
        densities: Densities | None = None,
        admitted: Admitted | None = None,
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
    ) -> Planner:
        """A planner of the same graph that knows more; what is not given stays as it is."""
        known = copy.copy(self)
        known.links = self.links if links is None else links
        known.densities = self.densities if densities is None else densities
        known.admitted = self.admitted if admitted is None else admitted
        known.calls = self.calls if calls is None else calls
        known.reference = known if self.reference is self else self.reference
        return known

    def is_large(self, value: int) -> bool:
        """Does its size matter to the peak?"""
        return self.graph.bytes_of(value) >= max(LEAST_BYTES, SMALLEST * self.kept.timeline.step_peak)

    @functools.cached_property
    def kept_seconds(self) -> float:
        return step_seconds(self.runs.schedule, self.seconds)

    @property
    def graph(self) -> Graph:
        return self.kept.schedule.graph

    def offers(self) -> list[Offer]:
        """From the fastest, which keeps everything, to the smallest."""
        build = self.fuse is None and len(self.graph.ops) <= SMALL_GRAPH
        offers: dict[tuple[Choice, int, float] | Choice, Offer] = {}
        for methods, search in self._searches():
            found = spread(search.within_reach(FAR), MOST_BUILT) if build else search.pareto()
            for outline in found:
                if outline.choice:
                    key = outline.choice if build else (outline.choice, outline.peak, outline.seconds)
                    if key not in offers:
                        offers[key] = self.given(outline.choice) if build else self._offer(outline)
                    offers[key].found_with.add(methods)
        return [self.as_it_is(), *offers.values()]

    def _searches(self) -> Iterator[tuple[Methods, Search]]:
        """One for every set of methods that makes a difference, each with what those before have found."""
        whole = Sketch(
            self.runs.schedule,
            self.runs.timeline,
            self.seconds,
            fused=self.fuse is not None,
            frozen=self.frozen,
            calls=self.calls,
        )
        large = len(self.graph.ops) * MOST_OUTLINES > EVALUATED_OPS
        done: list[tuple[Methods, Search]] = []
        for methods in dataclasses.replace(self.methods, move=bool(self.links)).narrower():
            sketch = whole.for_choices(recompute=methods.recompute)
            sketch.put_on_offer(self.stand_ins(sketch.candidates - self.frozen, methods))
            narrower = [search for other, search in done if other.within(methods)]
            if not sketch.offers_more_than(search.sketch for search in narrower):
                continue
            proposed = self.proposed if sketch.droppable and not (large and narrower) else ()
            search = Search(sketch, narrower)
            search.run(sketch.numbers(values) for values in proposed)
            done.append((methods, search))
            yield methods, search

    @functools.cached_property
    def proposed(self) -> list[frozenset[int]]:
        """By strategies."""
        return [strategy(self.graph) for strategy in STRATEGIES.values()]

    def stand_ins(self, values: Collection[int], methods: Methods) -> list[StandIn]:
        """What may be held in the place of these values."""
        codes = encodings(self.graph, values, methods.codecs, self.seconds, self.densities, self.admitted)
        found: list[StandIn] = [*codes]
        if methods.stash and not self.exact:
            found += stashes(self.graph, values, self.seconds, self.workspace)
        return [*found, *offloads(self.graph, values, self.links, codes)] if methods.move else found

    def as_it_is(self) -> Offer:
        """Keeping everything."""
        if self.reference is self:
            return Offer(self._peak(self.runs), 0.0, build=lambda: self.kept, fuse=lambda plan: self.runs)
        return self.offer(KEEP_EVERYTHING, self._peak(self.runs), self._overhead(self.kept_seconds))

    def _offer(self, outline: Outline) -> Offer:
        return self.offer(outline.choice, outline.peak, self._overhead(self.kept_seconds + outline.seconds))

    def _peak(self, plan: Plan) -> int:
        """The peak of a plan, on top of what other calls save."""
        others = self.calls - 1
        return plan.timeline.step_peak + (others * CallCosts.of(plan).saved if others else 0)

    def _overhead(self, seconds: float) -> float:
        return max(0.0, seconds / self.reference.kept_seconds - 1)

    def given(self, choice: Choice) -> Offer:
        """A plan that somebody else has made."""
        plan = self._fuse_and_time(self.plan(choice))
        return self.offer(choice, self._peak(plan), self._overhead(plan.seconds or self.kept_seconds))

    def offer(self, choice: Choice, step_peak: int, overhead: float) -> Offer:
        """The plan that carries out this choice."""
        return Offer(step_peak, overhead, build=lambda: self.plan(choice), fuse=self._fuse_and_time)

    def plan(self, choice: Choice) -> Plan:
        """The plan that carries out this choice, as separate operators."""
        if not choice:
            return self.kept
        graph = carry_out(self.graph, choice, exact=self.exact)
        schedule = schedule_step(graph)
        plan = Plan(
            name=_name(choice),
            decisions=self._decisions(schedule, choice),
            schedule=schedule,
            timeline=simulate(schedule, self.workspace, outputs_outlive=self.kept.timeline.outputs_outlive),
            choice=choice,
            slices=self.kept.slices,
            lean=self.kept.lean,
        )
        return plan if self.fuse is not None else self.timed(plan)

    def _fuse_and_time(self, plan: Plan) -> Plan:
        return plan if self.fuse is None else self.timed(self.fuse(plan))

    def timed(self, plan: Plan) -> Plan:
        """A plan with its seconds, its transfers beside its operators."""
        if not plan.choice.offload:
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

    def _decisions(self, schedule: Schedule, choice: Choice) -> Mapping[int, Decision]:
        graph, before = schedule.graph, self.kept.decisions
        encoded = self._encoded(graph, choice)
        decided = {**encoded, **self._stashed(graph, choice), **self._offloaded(graph, choice, encoded)}
        standing = {
            op.writes[0]
            for op in graph.ops
            if op.forward and (isinstance(op.target, StoreTo) or (choice.encode and op.target in ENCODERS))
        }
        saved = {value for value in feature_maps(schedule) if value not in standing}
        decisions: dict[int, Decision] = {}
        for value in dict.fromkeys((*before, *sorted(decided), *sorted(saved))):
            if value in decided:
                decisions[value] = decided[value]
            elif value not in saved:
                maker = self.graph.producer(value)
                cost = 0.0 if maker is None else self.seconds(self.graph, maker)
                decisions[value] = Recompute("cheaper to compute again than to hold", cost)
            elif value in before:
                decisions[value] = Keep("holding it does not set the peak, or making it again costs more")
            else:
                decisions[value] = Keep("kept instead of what is computed again from it")
        return decisions

    def _encoded(self, graph: Graph, choice: Choice) -> dict[int, Decision]:
        """What is held as a code, with the seconds that its operators take."""
        spent: dict[int, float] = {}
        of_code: dict[int | None, int] = {}  # of a code, of its token on a tier, and of what comes back for that
        for op in graph.ops if choice.encode else ():
            if op.forward and op.target in ENCODERS:
                of_code[op.writes[0]] = op.reads[0]
                spent[op.reads[0]] = self.seconds(graph, op)
            elif isinstance(op.target, StoreTo | LoadFrom) and op.reads[0] in of_code:
                of_code[op.writes[0]] = of_code[op.reads[0]]
            elif op.again and op.target in DECODERS:
                spent[of_code[op.reads[0]]] += self.seconds(graph, op)
        asked = (one for one in choice.encode if one.value in spent)
        return {one.value: _encode(CODECS[one.codec], one.bytes, spent[one.value]) for one in asked}

    def _offloaded(self, graph: Graph, choice: Choice, encoded: Mapping[int, Decision]) -> dict[int, Decision]:
        """What goes to a tier, as it is or as a code."""
        found: dict[int, Decision] = {}
        stored = {op.reads[0] for op in graph.ops if op.forward and isinstance(op.target, StoreTo)}
        for value, tier in choice.offload:
            code = encoded.get(value)
            if code is None and value not in stored:
                continue  # nobody asks for it
            size, seconds, codec, lossless = graph.bytes_of(value), 0.0, "", True
            if isinstance(code, Encode):
                size, seconds, codec, lossless = code.bytes, code.seconds, code.codec, code.lossless
            seconds += self.links[tier].lost_seconds(size)
            found[value] = Offload(tier, size, "moves while others compute", seconds, codec, lossless)
        return found

    def _stashed(self, graph: Graph, choice: Choice) -> dict[int, Decision]:
        """What recurrent operators do not keep."""
        every = {one.output: one.every for one in choice.stash}
        found: dict[int, Decision] = {}
        for one in recurrent(self.graph) if every else ():
            steps = every.get(one.output)
            if steps is not None:
                lean = keep_less(self.graph, [Stashed(one.output, steps)])
                ops = (one.forward, one.backward)
                cost = sum(self.seconds(lean, lean.ops[op.id]) - self.seconds(self.graph, op) for op in ops)
                for value in one.residue:
                    kept = graph.bytes_of(value)
                    why = f"kept every {steps} steps" if kept else "built again in backward from the outputs"
                    whole = self.graph.bytes_of(value), self.graph.values[value].shape
                    found[value] = Stash(steps, kept, whole, why, max(0.0, cost) / len(one.residue))
        return found


def spread(outlines: Sequence[Outline], most: int) -> list[Outline]:
    """At most so many of the outlines, from the first to the last."""
    return [outlines[number * len(outlines) // most] for number in range(most)] if len(outlines) > most else [*outlines]


def menu(planners: Sequence[Planner]) -> list[Offer]:
    """The offers of several forms of one graph, the form as it is first: of every set of methods each that is worth
    having."""
    as_it_is, *found = [offer for planner in planners for offer in planner.offers()]
    worth = [offer for searched in by_methods([as_it_is, *found]) for offer in worth_having(searched)]
    return [as_it_is, *sorted(set(worth) - {as_it_is}, key=lambda offer: (offer.overhead, offer.step_peak))]


def _encode(codec: Codec, size: int, seconds: float) -> Encode:
    return Encode(codec.name, size, codec.what, seconds, codec.lossless)


def _name(choice: Choice) -> str:
    """What a plan does, in a word or three."""
    parts = {
        "recompute": choice.recompute,
        "encode": choice.encode,
        "stash": choice.stash,
        "offload": choice.offload,
    }
    return " and ".join(name for name, part in parts.items() if part)


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
