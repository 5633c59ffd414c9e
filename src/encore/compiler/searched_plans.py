"""The plans that a search finds for one graph, with lossy codecs within their bound."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings

import torch

from encore.compiler.bounded_codecs import BoundedCodecs
from encore.compiler.candidates import Candidates, Carried, densities_of, is_needed, offers_of
from encore.compiler.captured import Captured
from encore.compiler.forms import Forms
from encore.compiler.known_structures import FinishedSearch
from encore.compiler.stage_clock import collector_paused
from encore.cost import AssumedSeconds
from encore.plan import Planner, lowest
from encore.plan.saved import fingerprint

MOST_EXCESSES = 3
"""How often lossy codecs may exceed their bound before a graph is planned without any."""

log = logging.getLogger("encore")


def searched_candidates(forms: Forms) -> Candidates:
    """The plans that a search finds, which are remembered for other graphs of the same structure."""
    captured, planner = forms.captured, forms.first
    options, session = captured.options, captured.session
    session.seconds.settle(planner.runs.schedule)
    planner = planner.informed(links=session.links, densities=densities_of(captured, planner))
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
    offers = offers_of(captured, planners, Planner.candidate_plans, is_needed(forms))
    return dataclasses.replace(candidates, forms=forms, offers=tuple(offers), planners=tuple(planners))


def search_untimed(candidates: Candidates) -> Candidates:
    """The smallest plans of a search that no measured time has a part in, in addition: which plans a search comes upon
    depends on their seconds, and whether a budget can be met must not."""
    offers = [*candidates.offers]
    for planner in candidates.planners:
        found = lowest(planner.informed(seconds=AssumedSeconds()).candidate_plans())
        offers += [planner.given(candidate.separate.fates) for candidate in found]
    return dataclasses.replace(candidates, offers=tuple(offers), planners=())


def search_anew(carried: Carried) -> Candidates:
    """The plans that a search finds for the graph itself."""
    log.info("%s: plans of other sizes do not serve it", carried.forms.captured.name)
    with collector_paused():
        return searched_candidates(carried.forms.priced_by(carried.forms.captured.session.seconds))


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
