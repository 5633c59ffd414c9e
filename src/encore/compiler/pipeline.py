"""The stages of one graph, from what was captured to two callables.

    Captured      a joint graph and its facts                          capture/, graph/
      unplanned   everything kept: what the step takes as it is        plan/
      rewrite     passes that keep less or compute faster              rewrite/
      candidates  the plans to choose from                             plan/
      choose      the fastest that fits, or the smallest in time       plan/
      fuse        its kernels, compiled                                schedule/, lower/
      lower       two callables                                        lower/

Each stage is a function from one frozen value to the next. Stages are timed; `ENCORE_LOG=1` shows the seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from encore.capture import torch_private
from encore.codecs import CODECS, Densities, Share
from encore.compiler.bounded_codecs import BoundedCodecs
from encore.compiler.call_plans import CallPlans, Offers, few, unbounded
from encore.compiler.captured import Captured
from encore.compiler.forms import Forms, fused, rewrite_for_speed
from encore.compiler.fuse import FusedPlan, kernels_of
from encore.compiler.known_structures import LARGER, SLOWER, SLOWER_BY, FinishedSearch
from encore.compiler.notes import device_notes, loop_notes, workspace_notes
from encore.compiler.observers import link_lessons, lossy_check
from encore.compiler.session import CapturedGraph
from encore.compiler.stage_clock import StageClock, collector_paused
from encore.compiler.variants import Variant
from encore.compiler.watch import watches
from encore.cost import AssumedSeconds, densities, may_be_narrow, may_be_sparse, time_kernels
from encore.cost.gradient_error import GradientError
from encore.cost.observation import Observation
from encore.errors import BudgetError, CheckError, IllegalGraphError
from encore.fates import Recompute, recomputable
from encore.graph import verify_graph
from encore.lower import lower
from encore.options import Budget
from encore.plan import (
    Candidate,
    GraphPlan,
    Plan,
    Planner,
    candidates_of,
    choose,
    feature_maps,
    keep_everything,
    keeps_budget,
    lowest,
    may_win,
    room_for,
    stack_plans,
    will_do,
    worth_having,
)
from encore.plan.budget import budget_error
from encore.plan.saved import fingerprint
from encore.schedule import Schedule, replay
from encore.units import bytes_text

UNKNOWN_MAPS = 0.05
"""Share of the peak that activations must take whose codes depend on the data, for the first batch to be looked at."""

MOST_EXCESSES = 3
"""How often lossy codecs may exceed their bound before a graph is planned without any."""

log = logging.getLogger("encore")


@dataclass(frozen=True, slots=True)
class Carried:
    """The plans that were searched for another graph of the same structure."""

    forms: Forms
    """Those of this graph, to be searched if the plans do not serve it."""
    nearest: FinishedSearch
    """What was reached at the nearest sizes."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The plans to choose from, and the planners that build them."""

    forms: Forms
    offers: tuple[Candidate, ...]
    bounded: BoundedCodecs | None = None
    """What measures the gradient error of lossy codecs, if they have a bound."""
    planners: tuple[Planner, ...] = ()
    """Those whose graphs were searched, or could be."""
    carried: Carried | None = None
    """Where they come from, if nothing was searched for this graph."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A candidate, and the gradient error of its lossy codecs as it was measured."""

    offer: Candidate
    error: GradientError | None = None
    excess: float = 0.0
    """The relative error, if it exceeds the bound; infinite if it could not be measured."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """The plan that was chosen, with its kernels, and the candidates it was chosen from."""

    captured: Captured
    candidates: Candidates
    chosen: Chosen
    fused: FusedPlan


def compile_captured(captured: Captured, clock: StageClock) -> Variant:
    """All stages, in order."""
    if not torch_private.in_backward():
        Observation.end_running()  # of this step, which is not measured: nothing is probed while a profiler runs
    with collector_paused():
        verify_graph(captured.graph)
    clock.lap("verify")
    if captured.calls:
        plans = plan_calls(captured, clock)
        _require_room_for_one_call(captured, plans)
        return plans.variant(plans.leanest)
    with torch_private.real_tensors():
        unplanned = keep_all(captured)
        fitting = plan_within_budget(captured, unplanned, clock)
        captured.session.workspaces.save()
        captured.session.seconds.save()
    fitting = with_saving_order(fitting)
    clock.lap("compile")
    variant = lower_plan(fitting, unplanned, clock)
    _log_graph(variant.captured)
    return variant


# -- graphs that share a budget with others, or with calls of their own --------------------------------------------


def plan_calls(captured: Captured, clock: StageClock) -> CallPlans:
    """The plans of a graph that is one of several calls in a step, for the step to choose from."""
    floor = dataclasses.replace(captured.options, budget=Budget(), lossy=unbounded(captured.options.lossy))
    captured = dataclasses.replace(captured, options=floor)
    with torch_private.real_tensors():
        unplanned = keep_all(captured)
        with collector_paused():
            forms = Forms.of(captured, unplanned, rewrite_for_speed(captured, unplanned))
            candidates = find_candidates(forms)
        captured.session.workspaces.save()
        captured.session.seconds.save()
    clock.lap("plan")

    def offers(found: Candidates) -> Offers:
        build = functools.partial(_built, found, unplanned, clock)
        return Offers(found.offers, found.forms.first.kept_seconds, build)

    def search(carried: Carried) -> Offers:
        with torch_private.compile_settings(), torch_private.real_tensors():
            return offers(search_anew(carried))

    carried = candidates.carried
    return CallPlans(unplanned, offers(candidates), None if carried is None else functools.partial(search, carried))


def _require_room_for_one_call(captured: Captured, plans: CallPlans) -> None:
    """Raise if a single call takes more than the budget: the step, which is not known yet, will take no less."""
    budget = captured.options.budget
    if budget is None or budget.bytes is None or budget.share is not None:
        return
    number = plans.smallest
    floor = plans.costs[number].peak + stack_plans([plans.kept]).parameters + captured.options.resident
    if floor > budget.bytes:
        if plans.search():
            _require_room_for_one_call(captured, plans)
            return
        plan, what = plans.candidates[number].plan, f"one call of {captured.name} alone"
        raise budget_error(plan, budget, budget.bytes, floor, tiers=bool(captured.options.tiers), what=what)


def _built(candidates: Candidates, unplanned: Plan, clock: StageClock, offer: Candidate) -> Variant:
    """Two callables that run a candidate."""
    captured = candidates.forms.captured
    with torch_private.compile_settings(), torch_private.real_tensors():
        found = fuse_candidate(candidates, offer)
    clock.lap("compile")
    variant = lower_plan(with_saving_order(Fitting(captured, candidates, Chosen(offer), found)), unplanned, clock)
    _log_graph(variant.captured)
    return variant


# -- unplanned -------------------------------------------------------------------------------------------------------


def keep_all(captured: Captured) -> Plan:
    """The step as it is: nothing rewritten, everything kept."""
    with collector_paused():
        return keep_everything(captured.graph, captured.session.workspaces, outputs_outlive=not captured.break_reason)


def plan_within_budget(captured: Captured, unplanned: Plan, clock: StageClock) -> Fitting:
    """Rewrite, find candidates, choose and fuse; for each meaning that a percentage may have, until one can be met."""
    *optional, last = budgets(captured, unplanned)
    for attempt in optional:
        try:
            return plan_graph(attempt, unplanned, clock)
        except BudgetError:
            continue
    return plan_graph(last, unplanned, clock)


def budgets(captured: Captured, unplanned: Plan) -> Iterator[Captured]:
    """The graph with its budget in bytes. A percentage is one of the largest unplanned step so far. If other graphs
    follow in the step, this one is first planned within the share of the step at hand, to leave them what they had in
    larger steps."""
    session, options, place = captured.session, captured.options, 1 + len(captured.before)
    own = stack_plans([*(graph.unplanned for graph in captured.before), unplanned]).total + options.resident
    largest = max(own, session.largest_step(place))
    for base in sorted({own, largest}) if captured.break_reason else [largest]:
        budget = None if options.budget is None else options.budget.of_step(base)
        yield dataclasses.replace(captured, options=dataclasses.replace(options, budget=budget))


def plan_graph(captured: Captured, unplanned: Plan, clock: StageClock) -> Fitting:
    """From the unplanned step to a plan with its kernels."""
    with collector_paused():
        rewritten = rewrite_for_speed(captured, unplanned)
        forms = Forms.of(captured, unplanned, rewritten)
        candidates = find_candidates(forms)
    fitting = choose_and_fuse(candidates, clock)
    own = stack_plans([*(graph.unplanned for graph in captured.before), unplanned]).total + captured.options.resident
    captured.session.note_step(1 + len(captured.before), own)
    return fitting


# -- candidates ------------------------------------------------------------------------------------------------------


def find_candidates(forms: Forms) -> Candidates:
    """The plans to choose from: the one that was given; what checkpoints in the model ask for, if nothing else is
    asked; only the one that keeps everything, if that is enough; those that were found for another graph of the same
    structure; else those that a search finds."""
    captured, planner = forms.captured, forms.first
    options, session = captured.options, captured.session
    if options.plan is not None:
        informed = dataclasses.replace(forms, first=planner.informed(links=session.links))
        forms, given = informed.given(options.plan.of_graph(captured.number))
        return Candidates(forms, (given,))
    as_it_is = planner.as_it_is()
    by_hand = torch_private.checkpointed(captured.joint)
    if by_hand and options.budget is None and options.overhead is None:
        return Candidates(forms, (_checkpointed(planner, as_it_is, by_hand),))
    if captured.runs and will_do(as_it_is, options, unplanned=forms.unplanned, earlier=captured.earlier):
        return Candidates(forms, (as_it_is,))
    return carried_candidates(forms) or searched_candidates(forms)


def _is_needed(forms: Forms) -> Callable[[Planner, Sequence[Candidate]], bool]:
    """Return whether a form of a graph may have a plan that is chosen. An estimate is asked for any budget."""
    captured = forms.captured

    def is_needed(form: Planner, found: Sequence[Candidate]) -> bool:
        fastest, options, earlier = form.as_it_is().overhead, captured.options, captured.earlier
        return not captured.runs or may_win(fastest, found, options, unplanned=forms.unplanned, earlier=earlier)

    return is_needed


def carried_candidates(forms: Forms) -> Candidates | None:
    """The plans that were found for other sizes, for the graph at hand; None where they are not known, or must not be
    used: lossy codecs are bounded by what they do to each graph."""
    captured, session = forms.captured, forms.captured.session
    if not captured.runs or captured.options.lossy.bound is not None:
        return None
    known = session.structures.of(captured.graph)
    nearest = known.nearest(session.structures.structure(captured.graph))
    if nearest is None:
        return None
    session.scaled_seconds.begin()
    patterns, planner = known.patterns, forms.first
    words = {word for one in patterns for label in one.labels for word in label.split()}
    by_data = any(not CODECS[name].exact_size for name in words.intersection(planner.methods.codecs))
    priced = forms.priced_by(session.scaled_seconds)
    planner = priced.first.informed(links=session.links, densities=_densities(captured, planner) if by_data else {})
    priced = dataclasses.replace(priced, first=planner)
    wanted = dict.fromkeys((one.lean, one.slices) for one in patterns)
    lean: Planner | None = None
    if any(is_lean for is_lean, _ in wanted):
        priced, lean = priced.with_lean()
    known_forms = [(priced.first, False), *([] if lean is None else [(lean, True)])]
    planners = (
        found
        for one, is_lean in known_forms
        for slices in (1, *(count for kind, count in wanted if kind is is_lean and count > 1))
        if (found := priced.in_slices(one, slices)) is not None
    )
    offers = _offers_of(captured, planners, lambda form: form.carried_plans(patterns), _is_needed(forms))
    return Candidates(priced, tuple(offers), carried=Carried(forms, nearest))


def searched_candidates(forms: Forms) -> Candidates:
    """The plans that a search finds, which are remembered for other graphs of the same structure."""
    captured, planner = forms.captured, forms.first
    options, session = captured.options, captured.session
    session.seconds.settle(planner.runs.schedule)
    planner = planner.informed(links=session.links, densities=_densities(captured, planner))
    bounded = None
    if captured.runs and options.lossy.bound is not None and "encode" in options.methods:
        bounded = _bounded(forms, planner, options.lossy.bound)
        planner = planner.informed(admitted=frozenset() if bounded is None else bounded.admitted())
        _warn_if_unmeasured(captured, bounded)
    found = search_plans(Candidates(dataclasses.replace(forms, first=planner), (), bounded))
    if captured.runs and options.lossy.bound is None:
        structure = session.structures.structure(captured.graph)
        session.structures.of(captured.graph).remember(FinishedSearch.of(structure, found.planners, found.offers))
    return found


def search_plans(candidates: Candidates) -> Candidates:
    """Search all forms of the graph."""
    forms, lean = candidates.forms.with_lean()
    captured = forms.captured
    planners = [form for one in (forms.first, lean) if one is not None for form in forms.all_slices(one)]
    offers = _offers_of(captured, planners, Planner.candidate_plans, _is_needed(forms))
    return dataclasses.replace(candidates, forms=forms, offers=tuple(offers), planners=tuple(planners))


def _offers_of(
    captured: Captured,
    planners: Iterable[Planner],
    plans_of: Callable[[Planner], list[Candidate]],
    is_needed: Callable[[Planner, Sequence[Candidate]], bool],
) -> list[Candidate]:
    """The candidates of all forms of a graph; of several calls, also those that save the least."""
    planners = [*planners] if captured.calls else planners
    offers = candidates_of(planners, is_needed, plans_of)
    if captured.calls:
        several = [planner.informed(calls=captured.calls + 1) for planner in planners]
        offers = few(offers) + few(candidates_of(several, candidate_plans=plans_of))
    return offers


def search_untimed(candidates: Candidates) -> Candidates:
    """The smallest plans of a search that no measured time has a part in, in addition: which plans a search comes upon
    depends on their seconds, and whether a budget can be met must not."""
    offers = [*candidates.offers]
    for planner in candidates.planners:
        found = lowest(planner.informed(seconds=AssumedSeconds()).candidate_plans())
        offers += [planner.given(candidate.separate.fates) for candidate in found]
    return dataclasses.replace(candidates, offers=tuple(offers), planners=())


def _checkpointed(planner: Planner, as_it_is: Candidate, by_hand: Collection[str]) -> Candidate:
    """What `torch.utils.checkpoint` in the model recomputes, unless that takes more than keeping everything."""
    ops = (op for op in planner.graph.ops if op.forward and op.name in by_hand)
    made = recomputable(planner.graph).intersection(value for op in ops for value in op.writes if value is not None)
    obeyed = planner.given(frozenset(map(Recompute, made)))
    return min(obeyed, as_it_is, key=lambda offer: offer.plan.timeline.step_peak)


def _densities(captured: Captured, planner: Planner) -> Densities:
    """How dense activations are on this batch, and how far integers reach, if there is a codec to which that
    matters."""
    asking = {codec.share for codec in map(CODECS.__getitem__, planner.methods.codecs) if not codec.exact_size}
    if not captured.runs or not asking:
        return {}
    graph, peak = planner.graph, planner.kept.timeline.step_peak
    large = [value for value in feature_maps(planner.kept.schedule) if planner.is_large(value)]
    unknown = {Share.NON_ZEROS: may_be_sparse, Share.NUMBER_BYTES: may_be_narrow}
    maps = {share: unknown[share](graph).intersection(large) for share in asking}
    if sum(map(graph.bytes_of, set().union(*maps.values()))) < UNKNOWN_MAPS * peak:
        return {}
    with torch_private.real_tensors():
        return densities(graph, captured.primals, maps)


def _bounded(forms: Forms, planner: Planner, bound: float) -> BoundedCodecs | None:
    """Lossy codecs whose measured effect on the gradients stays within the bound. If they have exceeded it in training,
    the next ones are chosen for a half of it, then for a quarter, then there are none."""
    captured, unplanned = forms.captured, forms.unplanned
    session, options = captured.session, captured.options
    limit = math.inf
    if options.budget is not None and not options.budget.is_floor:
        whole = unplanned.timeline.resident + unplanned.timeline.step_peak + options.resident
        limit = options.budget.resolve(whole) - unplanned.timeline.resident - options.resident
    name, sent = fingerprint(unplanned.schedule.graph), list[torch.Tensor]()
    if session.excesses[name] > MOST_EXCESSES:
        return None
    allowed = captured.share_of(bound) / 2 ** max(0, session.excesses[name] - 1)
    if name in session.sent_tangents:
        sent, session.sent_tangents[name] = session.sent_tangents[name], []
    return BoundedCodecs(planner, captured.primals, allowed, limit, sent)


def _warn_if_unmeasured(captured: Captured, bounded: BoundedCodecs | None) -> None:
    if bounded is not None and bounded.why_none:
        warnings.warn(
            f"encore: {captured.name} uses no lossy codecs: their effect on the gradients cannot be measured, since "
            f"{bounded.why_none}; lossy= with names of codecs allows them without a bound",
            stacklevel=2,
        )


# -- choose and fuse -------------------------------------------------------------------------------------------------


def choose_and_fuse(candidates: Candidates, clock: StageClock) -> Fitting:
    """The plan that is asked for, with its kernels. If a plan keeps neither the bound on the gradient error nor, with
    its kernels, the peak that was predicted, the next one is chosen. No budget is rejected before plans are searched
    without measured times."""
    while True:
        try:
            chosen = choose_candidate(candidates)
        except BudgetError:
            if candidates.carried is not None:
                candidates = search_anew(candidates.carried)
                continue
            if not candidates.planners:
                raise
            candidates = search_untimed(candidates)
            continue
        if candidates.carried is not None and _falls_short(candidates, candidates.carried, chosen.offer):
            candidates = search_anew(candidates.carried)
            continue
        if chosen.excess:
            candidates = _tightened(candidates, chosen.excess)
            continue
        forms, offer = _agreed(candidates.forms, chosen.offer)
        candidates = dataclasses.replace(candidates, forms=forms)
        clock.lap("plan")
        found = fuse_candidate(candidates, offer)
        if offer is not chosen.offer or _fits(candidates.forms, offer, found.plan):
            return Fitting(forms.captured, candidates, dataclasses.replace(chosen, offer=offer), found)
        corrected = tuple(offer.built(found.plan) if one is offer else one for one in candidates.offers)
        candidates = dataclasses.replace(candidates, offers=corrected)


def search_anew(carried: Carried) -> Candidates:
    """The plans that a search finds for the graph itself."""
    log.info("%s: plans of other sizes do not serve it", carried.forms.captured.name)
    with collector_paused():
        return searched_candidates(carried.forms.priced_by(carried.forms.captured.session.seconds))


def _falls_short(candidates: Candidates, carried: Carried, offer: Candidate) -> bool:
    """Return whether a carried plan is far from what the search at the nearest sizes has reached."""
    forms, kept = candidates.forms, candidates.offers[0].plan
    options = forms.captured.options
    share, overhead = offer.plan.timeline.step_peak / kept.timeline.step_peak, offer.plan.overhead
    if options.budget is None:
        return share > LARGER * carried.nearest.least_share(options.allowed_overhead)
    if options.budget.is_floor:
        return share > LARGER * carried.nearest.least_share(math.inf)
    room = room_for(kept, options, unplanned=forms.unplanned, earlier=forms.captured.earlier)
    return overhead > SLOWER * carried.nearest.least_overhead(room / kept.timeline.step_peak) + SLOWER_BY


def choose_candidate(candidates: Candidates) -> Chosen:
    """The candidate that is asked for, and what its lossy codecs do to the gradients."""
    forms = candidates.forms
    options = forms.captured.options
    if options.plan is not None:
        return Chosen(candidates.offers[0])
    with collector_paused():
        offer = choose(
            candidates.offers,
            options,
            unplanned=forms.unplanned,
            earlier=forms.captured.earlier,
            thorough=candidates.carried is None,
        )
    bounded, plan = candidates.bounded, offer.separate
    if bounded is None or all(fate.lossless for fate in plan.fates):
        return Chosen(offer)
    found = bounded.error_of(plan)
    if found is not None and found.relative <= bounded.bound:
        return Chosen(offer, found)
    log.info("%s: a plan with a gradient error of %s is dropped", forms.captured.name, found)
    return Chosen(offer, found, excess=math.inf if found is None else found.relative)


def _tightened(candidates: Candidates, excess: float) -> Candidates:
    """Candidates with fewer and better lossy codecs."""
    forms, bounded = candidates.forms, candidates.bounded
    assert bounded is not None, "only lossy codecs exceed a bound"
    planner = forms.first.informed(admitted=bounded.tightened(excess))
    with collector_paused():
        return search_plans(dataclasses.replace(candidates, forms=dataclasses.replace(forms, first=planner)))


def _agreed(forms: Forms, offer: Candidate) -> tuple[Forms, Candidate]:
    """Ranks time their operators each by itself and would plan differently: the first to plan a graph decides."""
    if not torch_private.has_ranks():
        return forms, offer
    mine = GraphPlan.of(forms.unplanned.schedule.graph, offer.separate)
    question = f"encore plan {mine.fingerprint} {dataclasses.replace(forms.captured.session.options, plan=None)}"
    agreed = GraphPlan.from_json(torch_private.first_value(question, mine.to_json()))
    return (forms, offer) if agreed == mine else forms.given(agreed, made_here=True)


def fuse_candidate(candidates: Candidates, offer: Candidate) -> FusedPlan:
    """The plan of a candidate, its kernels compiled and timed."""
    forms, several = candidates.forms, len(candidates.offers) > 1
    captured, planner = forms.captured, forms.first
    if planner.fuse is None:
        return FusedPlan(offer.plan, {}, 0)
    found = fused(captured, offer.separate, compile_kernels=captured.runs)
    plan = dataclasses.replace(found.plan, overhead=offer.plan.overhead)
    if several:
        seconds = captured.session.seconds if candidates.carried is None else captured.session.scaled_seconds
        time_kernels(seconds, kernels_of(plan.schedule), found.kernels)
    if several or plan.tiers:
        plan = planner.timed(plan)
    return dataclasses.replace(found, plan=plan)


def _fits(forms: Forms, offer: Candidate, plan: Plan) -> bool:
    """Return whether a plan, with its kernels, takes no more than was predicted, or than the budget."""
    captured = forms.captured
    within = keeps_budget(plan, captured.options, unplanned=forms.unplanned, earlier=captured.earlier)
    return within or plan.timeline.step_peak <= offer.plan.timeline.step_peak


# -- lower -----------------------------------------------------------------------------------------------------------


def with_saving_order(fitting: Fitting) -> Fitting:
    """The same plan, with what it saves in the order in which AOTAutograd wants it."""
    plan = fitting.fused.plan
    ordered = dataclasses.replace(plan, schedule=_in_saving_order(fitting.captured, plan.schedule))
    with collector_paused():
        verify_graph(ordered.schedule.graph)
    return dataclasses.replace(fitting, fused=dataclasses.replace(fitting.fused, plan=ordered))


def _in_saving_order(captured: Captured, schedule: Schedule) -> Schedule:
    names = {schedule.graph.values[value].name: value for value in schedule.saved}
    ordered = torch_private.unchecked_last(captured.joint, tuple(names))
    return dataclasses.replace(schedule, saved=tuple(names[name] for name in ordered))


def lower_plan(fitting: Fitting, unplanned: Plan, clock: StageClock) -> Variant:
    """Two callables that run the plan, filed with what is known of it."""
    captured, found, forms = fitting.captured, fitting.fused, fitting.candidates.forms
    session, plan, offers = captured.session, found.plan, fitting.candidates.offers
    # An estimate compiles no kernels: it runs the operators, on tensors without memory.
    runs = plan.schedule if captured.runs else _in_saving_order(captured, forms.first.kept.schedule)
    watching = watches(plan) if captured.runs else {}
    transports = session.transports if plan.tiers and captured.runs else {}
    if session.checks:
        _replay(captured, plan)
    name = captured.name.replace(" ", "_")
    with collector_paused():
        lowered = lower(runs, name, found.kernels, watching, transports, checked=session.checks)
    clock.lap("lower")
    graph = CapturedGraph(
        name=captured.name,
        unplanned=unplanned,
        plan=plan,
        limit=captured.options.budget.bytes if captured.options.budget is not None else None,
        break_reason=captured.break_reason,
        break_line=captured.break_line,
        seconds=clock.seconds,
        sources=(lowered.forward_source, lowered.backward_source),
        rewrites=forms.passes[plan.lean],
        kernels_compiled=found.compiled,
        watches=tuple(watching.values()),
        offers=() if captured.runs else offers,
        choices=tuple(offer.peak_and_overhead for offer in worth_having(offers)),
        notes=(
            *workspace_notes(plan.schedule.graph, session.workspaces),
            *loop_notes(plan.schedule.graph),
            *device_notes(plan.schedule.graph),
            *captured.notes,
        ),
        lossy_check=lossy_check(captured, found, fitting.chosen.error),
        lessons=link_lessons(captured, plan),
    )
    return Variant(captured.used, graph, lowered)


def _replay(captured: Captured, plan: Plan) -> None:
    """Have the replayer follow what is lowered, within the peak that was predicted."""
    try:
        replay(plan.schedule, limit=plan.timeline.step_peak, workspace=captured.session.workspaces)
    except IllegalGraphError as error:
        raise CheckError(f"ENCORE_CHECK: {captured.name}: {error}. This is a bug in Encore: please report it") from None


def _log_graph(captured: CapturedGraph) -> None:
    graph, timeline = captured.plan.schedule.graph, captured.plan.timeline
    log.info(
        "%s: %d operators, peak %s (saved %s), plan %r; seconds: %s",
        captured.name, len(graph.ops), bytes_text(timeline.step_peak), bytes_text(timeline.saved), captured.plan.name,
        ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in captured.seconds.items()),
    )  # fmt: skip
