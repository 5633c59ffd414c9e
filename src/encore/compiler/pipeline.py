"""The stages of one graph, from what was captured to two callables.

    Captured      a joint graph and its facts                          capture/, graph/
      unplanned   everything kept: what the step takes as it is        plan/
      rewrite     passes that keep less or compute faster              rewrite/, forms.py
      candidates  the plans to choose from                             plan/, carried_plans.py, searched_plans.py
      choose      the fastest that fits, or the smallest in time       plan/, chosen_plan.py
      fuse        its kernels, compiled                                schedule/, lower/, chosen_plan.py
      lower       two callables                                        lower/, lowered_plan.py

Each stage is a function from one frozen value to the next. Stages are timed; `ENCORE_LOG=1` shows the seconds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator

from encore.capture import torch_private
from encore.compiler.call_plans import CallPlans, Offers, unbounded
from encore.compiler.candidates import Candidates, Carried
from encore.compiler.captured import Captured
from encore.compiler.carried_plans import carried_candidates
from encore.compiler.chosen_plan import Chosen, Fitting, choose_and_fuse, fuse_candidate
from encore.compiler.device_budget import on_devices
from encore.compiler.forms import Forms, rewrite_for_speed
from encore.compiler.lowered_plan import log_graph, lower_plan, with_saving_order
from encore.compiler.searched_plans import search_anew, searched_candidates
from encore.compiler.stage_clock import StageClock, collector_paused
from encore.compiler.variants import Variant
from encore.cost.observation import Observation
from encore.devices import release_cached
from encore.errors import BudgetError
from encore.fates import Recompute, recomputable
from encore.graph import verify_graph
from encore.options import Budget
from encore.plan import Candidate, GraphPlan, Plan, Planner, allocated_bytes, keep_everything, stack_plans, will_do
from encore.plan.budget import budget_error


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
    if variant.captured.footprint is not None and captured.runs:
        release_cached()  # what measuring has left
    log_graph(variant.captured)
    return variant


# -- one graph ---------------------------------------------------------------------------------------------------------


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
    plans = [*(graph.unplanned for graph in captured.before), unplanned]
    own = allocated_bytes(plans, options.resident)
    largest = max(own, session.largest_step(place))
    graphs, primals = [plan.schedule.graph for plan in plans], () if captured.before else captured.primals
    for base in sorted({own, largest}) if captured.break_reason else [largest]:
        budget = None
        if options.budget is not None:
            asked = options.budget.of_step(base)
            budget = on_devices(
                asked,
                graphs,
                options,
                session.workspaces,
                primals=primals,
                runs=captured.runs,
                sharded=session.sharded is not None,
            )
        yield dataclasses.replace(captured, options=dataclasses.replace(options, budget=budget))


def plan_graph(captured: Captured, unplanned: Plan, clock: StageClock) -> Fitting:
    """From the unplanned step to a plan with its kernels."""
    with collector_paused():
        rewritten = rewrite_for_speed(captured, unplanned)
        forms = Forms.of(captured, unplanned, rewritten)
        candidates = find_candidates(forms)
    fitting = choose_and_fuse(candidates, clock)
    plans = [*(graph.unplanned for graph in captured.before), unplanned]
    own = allocated_bytes(plans, captured.options.resident)
    captured.session.note_step(1 + len(captured.before), own)
    return fitting


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


def _checkpointed(planner: Planner, as_it_is: Candidate, by_hand: Collection[str]) -> Candidate:
    """What `torch.utils.checkpoint` in the model recomputes, unless that takes more than keeping everything."""
    ops = (op for op in planner.graph.ops if op.forward and op.name in by_hand)
    made = recomputable(planner.graph).intersection(value for op in ops for value in op.writes if value is not None)
    obeyed = planner.given(frozenset(map(Recompute, made)))
    return min(obeyed, as_it_is, key=lambda offer: offer.plan.timeline.step_peak)


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

        def given(plan: GraphPlan) -> tuple[Candidate, Callable[[Candidate], Variant]]:
            with torch_private.compile_settings(), torch_private.real_tensors(), collector_paused():
                forms, offer = found.forms.given(plan, made_here=True)
            return offer, functools.partial(_built, dataclasses.replace(found, forms=forms), unplanned, clock)

        return Offers(found.offers, found.forms.first.kept_seconds, build, given)

    def search(carried: Carried) -> Offers:
        with torch_private.compile_settings(), torch_private.real_tensors():
            return offers(search_anew(carried))

    carried = candidates.carried
    return CallPlans(unplanned, offers(candidates), None if carried is None else functools.partial(search, carried))


def _require_room_for_one_call(captured: Captured, plans: CallPlans) -> None:
    """Raise if a single call takes more than the budget: the step, which is not known yet, will take no less."""
    budget, session = captured.options.budget, captured.session
    if budget is not None:
        budget = on_devices(
            budget,
            [captured.graph],
            captured.options,
            session.workspaces,
            runs=captured.runs,
            sharded=session.sharded is not None,
        )
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
    log_graph(variant.captured)
    return variant
