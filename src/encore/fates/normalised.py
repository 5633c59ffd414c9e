"""Normalisations taken apart: their result is `(x - mean) * scale * weight + bias`, and mean and scale are kept anyway.

Taken again that way, a normalisation needs no reduction and melts into the kernel that reads it. The last bits may
differ from those of PyTorch's own kernel, so the eager lowering runs that instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from encore.graph import Graph, Op
from encore.graph.values import Ref

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Normalised:
    """What a normalisation is made of, with the shapes in which statistics and weights broadcast."""

    source: int
    mean: int
    scale: int
    weight: int | None
    bias: int | None
    statistics: tuple[int, ...]
    affine: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(
            value for value in (self.source, self.mean, self.scale, self.weight, self.bias) if value is not None
        )


def _batch_norm(graph: Graph, op: Op) -> Normalised | None:
    if not is_training_batch_norm(op) or not _one_type(graph, op):
        return None
    source, weight, bias = (argument.value if isinstance(argument, Ref) else None for argument in op.args[:3])
    assert source is not None
    rank = len(graph.values[source].shape)
    wide = (1, graph.values[source].shape[1], *([1] * (rank - 2)))
    mean, scale = op.writes[1:3]
    if mean is None or scale is None:
        return None
    return Normalised(source, mean, scale, weight, bias, wide, wide)


def _layer_norm(graph: Graph, op: Op) -> Normalised | None:
    if not _one_type(graph, op):
        return None
    source, shape, weight, bias = op.args[:4]
    mean, scale = op.writes[1:3]
    if mean is None or scale is None:
        return None
    return Normalised(
        source.value,
        mean,
        scale,
        weight.value if isinstance(weight, Ref) else None,
        bias.value if isinstance(bias, Ref) else None,
        graph.values[mean].shape,
        tuple(shape),
    )


FROM_STATISTICS: dict[Any, Callable[[Graph, Op], Normalised | None]] = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_layer_norm.default: _layer_norm,
}
BATCH_NORM_TRAINS = 5


def is_training_batch_norm(op: Op) -> bool:
    """Return whether an operator normalises by the batch, whatever its running statistics are."""
    return op.target is aten._native_batch_norm_legit_functional.default and bool(op.args[BATCH_NORM_TRAINS])


def _one_type(graph: Graph, op: Op) -> bool:
    """Half precision keeps its statistics in another type: left to PyTorch's own operator."""
    return len({graph.values[value].dtype for value in (*op.reads, *op.writes[:3]) if value is not None}) == 1
