"""The share of non-zero elements of activations and the range of integers, measured on the first batch: they give the
size of codes that depends on the data.

Forward runs once more for it, operator by operator, on the tensors that the step was called with. Only counts and
ranges are kept, so that it takes the memory of forward without gradients. The states of generators are restored;
operators that write, communicate or are unknown are left out, with all that depends on them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from encore.codecs import Densities, Share
from encore.codecs.integers import INTEGERS, range_of, width_for
from encore.devices import generators_kept
from encore.graph import Graph, Op, OpClass
from encore.graph.torch_private import FakeTensor, packet_name
from encore.graph.values import map_refs
from encore.lower.calls import callable_for

log = logging.getLogger("encore")

MAKE_ZEROS = frozenset({
    "relu", "threshold", "clamp", "clamp_min", "clamp_max", "hardtanh", "hardswish", "masked_fill", "where", "tril",
    "triu", "dropout_noise", "bernoulli_noise", "native_dropout",
})  # fmt: skip
"""Operators whose results may have many zeros."""
PASS_ZEROS = frozenset({
    "mul", "max_pool2d_with_indices", "adaptive_max_pool2d", "cat", "stack", "clone", "_to_copy", "constant_pad_nd",
    "index", "index_select", "gather", "neg", "abs", "div", "minimum",
})  # fmt: skip
"""Operators whose results have zeros if an operand has."""
RUN = frozenset({OpClass.VIEW, OpClass.CHEAP, OpClass.HEAVY, OpClass.RANDOM})
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MARGIN, LEAST_MARGIN = 1.1, 0.02
"""Added to the measured share, since later batches may be denser: a factor, and the least."""


def densities(graph: Graph, primals: Sequence[Any], values: Mapping[Share, Collection[int]]) -> Densities:
    """Return the densities that these values are planned to have at most, without those that cannot be measured."""
    found: dict[Share, dict[str, float]] = {share: {} for share in values}
    if len(primals) != len(graph.primals) or any(isinstance(primal, FakeTensor) for primal in primals):
        return found
    forward = _leading_to(graph, [value for wanted in values.values() for value in wanted])
    last = {value: op.id for op in forward for value in op.reads}
    alive: dict[int, Any] = {**dict(zip(graph.primals, primals, strict=True)), **graph.constants}
    with torch.no_grad(), generators_kept():
        for op in forward:
            if not _may_run(op) or any(alive.get(value) is None for value in op.reads):
                continue
            try:
                results = callable_for(op.target)(*map_refs(op.args, alive.get), **map_refs(op.kwargs, alive.get))
            except Exception as error:  # of any kind: the step itself raises it, too
                log.info("densities after %s are unknown: it cannot be run (%s)", op.name, error)
                continue
            for value, result in zip(op.writes, results if op.returns_tuple else (results,), strict=False):
                for share, wanted in values.items():
                    if value is not None and value in wanted and isinstance(result, torch.Tensor):
                        found[share][graph.values[value].name] = PLANNED[share](result)
                if value is not None and value in last:
                    alive[value] = result
            for value in op.reads:
                if last[value] == op.id:
                    alive.pop(value, None)
            del results
    return found


def may_be_sparse(graph: Graph) -> set[int]:
    """Return the values of forward that probably have many zeros, by their operators."""
    found: set[int] = set()
    for op in graph.ops:
        packet = packet_name(op.target)
        passes = op.kind is OpClass.VIEW or packet in PASS_ZEROS
        masked = packet == "mul" and any(graph.values[value].dtype is torch.bool for value in op.reads)
        if op.forward and (packet in MAKE_ZEROS or masked or (passes and not found.isdisjoint(op.reads))):
            found.update(value for value in op.writes if value is not None)
    return found


def may_be_narrow(graph: Graph) -> set[int]:
    """Return the integers of forward, whose range is unknown."""
    made = (value for op in graph.ops if op.forward for value in op.writes if value is not None)
    return {value for value in made if graph.values[value].dtype in INTEGERS}


def _leading_to(graph: Graph, values: Collection[int]) -> list[Op]:
    """The operators of forward that compute these values, in order."""
    needed = set(values)
    chosen = []
    for op in reversed(graph.ops):
        if op.forward and not needed.isdisjoint(op.writes):
            chosen.append(op)
            needed.update(op.reads)
    return chosen[::-1]


def planned_density(seen: torch.Tensor) -> float:
    """The share of elements that are not zero, with a margin for later batches."""
    bits = seen.view(BITS[seen.element_size()]) if seen.is_floating_point() else seen  # -0.0 is stored
    share = int(torch.count_nonzero(bits)) / max(1, math.prod(seen.shape))
    return min(1.0, max(MARGIN * share, share + LEAST_MARGIN))


def planned_width(seen: torch.Tensor) -> float:
    """The share of a number's bytes that the range of all of them needs, with a margin for later batches."""
    least, most = range_of(seen)
    return min(1.0, width_for(math.ceil(MARGIN * (most - least))) / seen.element_size())


PLANNED: Mapping[Share, Callable[[torch.Tensor], float]] = {
    Share.NON_ZEROS: planned_density,
    Share.NUMBER_BYTES: planned_width,
}


def _may_run(op: Op) -> bool:
    generators = (isinstance(argument, torch.Generator) for argument in (*op.args, *op.kwargs.values()))
    return op.kind in RUN and not any(generators)
