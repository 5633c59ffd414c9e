"""The plans to choose from for one graph, and what a search of plans and plans carried over have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from encore.capture import torch_private
from encore.codecs import CODECS, Densities, Share
from encore.compiler.bounded_codecs import BoundedCodecs
from encore.compiler.call_plans import few
from encore.compiler.captured import Captured
from encore.compiler.forms import Forms
from encore.compiler.known_structures import FinishedSearch
from encore.cost import densities, may_be_narrow, may_be_sparse
from encore.plan import Candidate, Planner, candidates_of, feature_maps, may_win

UNKNOWN_MAPS = 0.05
"""Share of the peak that activations must take whose codes depend on the data, for the first batch to be looked at."""


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


def is_needed(forms: Forms) -> Callable[[Planner, Sequence[Candidate]], bool]:
    """Return whether a form of a graph may have a plan that is chosen. An estimate is asked for any budget."""
    captured = forms.captured

    def is_needed(form: Planner, found: Sequence[Candidate]) -> bool:
        fastest, options, earlier = form.as_it_is().overhead, captured.options, captured.earlier
        return not captured.runs or may_win(fastest, found, options, unplanned=forms.unplanned, earlier=earlier)

    return is_needed


def offers_of(
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


def densities_of(captured: Captured, planner: Planner) -> Densities:
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
