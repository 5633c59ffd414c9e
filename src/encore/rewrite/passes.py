"""The passes in their order, and the one place that decides whether what they did stays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from encore.graph import Graph
from encore.rewrite.channels_last import channels_last
from encore.rewrite.fold_additions import fold_additions
from encore.rewrite.hoist_projections import hoist_projections
from encore.rewrite.judge import Judge
from encore.rewrite.merge_siblings import merge_siblings
from encore.rewrite.narrow_indices import narrow_indices
from encore.rewrite.narrow_masks import narrow_masks
from encore.rewrite.split_convolutions import split_convolutions
from encore.rewrite.stack_weight_gradients import stack_weight_gradients
from encore.rewrite.transpose_weights import transpose_weights

CHUNKS = (8, 4)
"""How many time steps at once; fewer where more would lift the peak. Fixed numbers, and whole chunks only, so that
the kernels around them are the same whatever the number of steps."""


def _once(run: Callable[[Graph, Judge], Graph]) -> Callable[[Graph, Judge], Iterator[Graph]]:
    def attempts(graph: Graph, judge: Judge) -> Iterator[Graph]:
        yield run(graph, judge)

    return attempts


def _in_chunks(run: Callable[[Graph, Judge, int], Graph]) -> Callable[[Graph, Judge], Iterator[Graph]]:
    def attempts(graph: Graph, judge: Judge) -> Iterator[Graph]:
        for chunk in CHUNKS:
            yield run(graph, judge, chunk)

    return attempts


def _channels_last(graph: Graph, judge: Judge) -> Graph:
    """Channels last without splitting backward would hold more than the step did before: the two go together."""
    laid_out = channels_last(graph, judge)
    return graph if laid_out is graph else split_convolutions(laid_out)


PASSES: dict[str, Callable[[Graph, Judge], Iterator[Graph]]] = {
    "narrow_indices": _once(lambda graph, judge: narrow_indices(graph)),
    "narrow_masks": _once(lambda graph, judge: narrow_masks(graph)),
    "channels_last": _once(_channels_last),
    "split_convolutions": _once(lambda graph, judge: split_convolutions(graph)),
    "transpose_weights": _once(transpose_weights),
    "hoist_projections": _in_chunks(hoist_projections),
    "merge_siblings": _once(merge_siblings),
    "fold_additions": _once(lambda graph, judge: fold_additions(graph)),
    "stack_weight_gradients": _in_chunks(stack_weight_gradients),
}


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A graph, and the passes that changed it."""

    graph: Graph
    applied: tuple[str, ...]


def rewrite(
    graph: Graph, judge: Judge, *, peak: Callable[[Graph], int], skip: Collection[str] = (), limit: int
) -> Rewritten:
    """Run the passes. `peak` simulates a graph; what would lift it above `limit` bytes does not stay."""
    applied = []
    for name, attempts in PASSES.items():
        if name in skip:
            continue
        for attempt in attempts(graph, judge):
            if attempt is not graph and peak(attempt) <= limit:
                graph = attempt
                applied.append(name)
                break
    judge.cache.save()
    return Rewritten(graph, tuple(applied))
