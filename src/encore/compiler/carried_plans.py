"""The plans of other sizes of a structure as candidates for the graph at hand, and whether they serve it."""

from __future__ import annotations

import dataclasses
import math

from encore.codecs import CODECS
from encore.compiler.candidates import Candidates, Carried, densities_of, is_needed, offers_of
from encore.compiler.forms import Forms
from encore.compiler.known_structures import LARGER, SLOWER, SLOWER_BY
from encore.plan import Candidate, Planner, room_for


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
    planner = priced.first.informed(links=session.links, densities=densities_of(captured, planner) if by_data else {})
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
    offers = offers_of(captured, planners, lambda form: form.carried_plans(patterns), is_needed(forms))
    return Candidates(priced, tuple(offers), carried=Carried(forms, nearest))


def falls_short(candidates: Candidates, carried: Carried, offer: Candidate) -> bool:
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
