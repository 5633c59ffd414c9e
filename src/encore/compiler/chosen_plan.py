"""The plan that is chosen for one graph, with its kernels."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass

from encore.capture import torch_private
from encore.compiler.candidates import Candidates
from encore.compiler.captured import Captured
from encore.compiler.carried_plans import falls_short
from encore.compiler.forms import Forms, fused
from encore.compiler.fuse import FusedPlan, kernels_of
from encore.compiler.searched_plans import search_anew, search_plans, search_untimed
from encore.compiler.stage_clock import StageClock, collector_paused
from encore.cost import time_kernels, trace_kernels
from encore.cost.gradient_error import GradientError
from encore.errors import BudgetError
from encore.plan import Candidate, GraphPlan, Plan, choose, keeps_budget, taken

log = logging.getLogger("encore")


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
        if candidates.carried is not None and falls_short(candidates, candidates.carried, chosen.offer):
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
    if captured.options.budget is not None and captured.options.budget.footprint is not None and captured.runs:
        trace_kernels(captured.session.workspaces, kernels_of(plan.schedule), found.kernels)
    if several or plan.tiers:
        plan = planner.timed(plan)
    return dataclasses.replace(found, plan=plan)


def _fits(forms: Forms, offer: Candidate, plan: Plan) -> bool:
    """Return whether a plan, with its kernels, takes no more than was predicted, or than the budget."""
    captured = forms.captured
    if keeps_budget(plan, captured.options, unplanned=forms.unplanned, earlier=captured.earlier):
        return True
    took, takes = (taken([*captured.earlier, one], captured.options) for one in (offer.plan, plan))
    return takes <= took
