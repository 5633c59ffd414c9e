"""The passes in their order, and the one place that decides whether what they did stays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from encore.checking import checks_enabled
from encore.errors import IllegalGraphError
from encore.graph import Graph, verify_graph
from encore.rewrite import (
    block_attention,
    channels_last,
    fold_additions,
    hoist_projections,
    mask_before_unpooling,
    merge_siblings,
    narrow_indices,
    narrow_masks,
    pool_maps,
    postpone_gradients,
    read_kept,
    read_sizes,
    score_attention,
    sign_bits,
    sign_masks,
    split_convolutions,
    stack_weight_gradients,
    transpose_weights,
)
from encore.rewrite.judge import Judge

CHUNKS = (8, 4)
"""How many time steps at once; fewer where more would raise the peak. Fixed numbers, and whole chunks only, so that
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
    """Channels last without splitting backward would take more memory than the step did: the two go together."""
    laid_out = channels_last.apply(graph, judge)
    return graph if laid_out is graph else split_convolutions.apply(laid_out)


PASSES: dict[str, Callable[[Graph, Judge], Iterator[Graph]]] = {
    "score_attention": _once(score_attention.apply),
    "block_attention": _once(block_attention.apply),
    "read_sizes": _once(lambda graph, judge: read_sizes.apply(graph)),
    "mask_before_unpooling": _once(lambda graph, judge: mask_before_unpooling.apply(graph)),
    "read_kept": _once(lambda graph, judge: read_kept.apply(graph, exact=judge.exact)),
    "sign_masks": _once(lambda graph, judge: sign_masks.apply(graph, exact=judge.exact)),
    "narrow_masks": _once(lambda graph, judge: narrow_masks.apply(graph)),
    "channels_last": _once(_channels_last),
    "split_convolutions": _once(lambda graph, judge: split_convolutions.apply(graph, exact=judge.exact)),
    "sign_bits": _once(lambda graph, judge: sign_bits.apply(graph, exact=judge.exact)),
    "pool_maps": _once(lambda graph, judge: pool_maps.apply(graph)),
    "narrow_indices": _once(lambda graph, judge: narrow_indices.apply(graph)),
    "transpose_weights": _once(transpose_weights.apply),
    "hoist_projections": _in_chunks(hoist_projections.apply),
    "merge_siblings": _once(merge_siblings.apply),
    "fold_additions": _once(lambda graph, judge: fold_additions.apply(graph)),
    "stack_weight_gradients": _in_chunks(stack_weight_gradients.apply),
    "postpone_gradients": _once(lambda graph, judge: postpone_gradients.apply(graph)),
}
EXACT = frozenset({
    "read_sizes", "mask_before_unpooling", "read_kept", "sign_masks", "narrow_masks", "split_convolutions", "sign_bits",
    "pool_maps", "narrow_indices", "postpone_gradients",
})  # fmt: skip
"""Passes that change no bit of any result."""
ORDERS = frozenset({"postpone_gradients"})
"""Passes that run the same operators in another order, for the sake of the peak alone."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A graph, and the passes that changed it."""

    graph: Graph
    applied: tuple[str, ...]


def rewrite(
    graph: Graph, judge: Judge, *, peak: Callable[[Graph], int], skip: Collection[str] = (), limit: int
) -> Rewritten:
    """Run the passes, or, where bit equality is asked for, those that change no bit. `peak` simulates a graph; a pass
    that raises it above `limit` bytes is not applied, nor another order that raises it at all."""
    applied = []
    for name, attempts in PASSES.items():
        if name in skip or (judge.exact and name not in EXACT):
            continue
        for attempt in _legal(name, graph, attempts(graph, judge)):
            if attempt is not graph and peak(attempt) <= (peak(graph) if name in ORDERS else limit):
                graph = attempt
                applied.append(name)
                break
    judge.cache.save()
    if judge.known is not None:
        judge.known.finish()
    return Rewritten(graph, tuple(applied))


def _legal(name: str, graph: Graph, attempts: Iterator[Graph]) -> Iterator[Graph]:
    """What a pass made of a graph, verified before anything else reads it. The step runs without a pass whose graph is
    illegal."""
    try:
        for attempt in attempts:
            if attempt is not graph:
                verify_graph(attempt)
            yield attempt
    except IllegalGraphError as error:
        if checks_enabled():
            raise
        warnings.warn(
            f"encore: the pass {name} is left out, because it made an {error}. The step runs without it; this is a bug "
            f"in Encore, please report it with the model. skip=({name!r},) silences this warning",
            stacklevel=2,
        )
