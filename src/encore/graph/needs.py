"""What a backward operator needs of each of its operands: a table, after Gist (Jain et al., ISCA 2018).

Autograd saves whole tensors for a formula. Many formulas need less: ReLU's needs the sign of an element, a pooling
layer's needs the size of its input and positions. What no operator needs as a whole need not be saved as a whole.
Operators that are not in the table are assumed to need every bit of every operand.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encore.graph.ops import OpClass
from encore.graph.values import Graph, Op, Ref, refs

aten = torch.ops.aten


class Need(enum.IntEnum):
    """From the least to the most; of several needs of one tensor, the largest decides."""

    SIZE = 0
    """Its shape and strides."""
    SIGN = 1
    """On which side of one or two constants (or of another tensor) each element lies: a bit an element."""
    POSITION = 2
    """Integers below a bound that the graph knows: positions in a window, rows of a table, classes."""
    VALUES = 3
    """The numbers themselves, as in every product."""


def _comparisons() -> dict[Any, Mapping[int, Need]]:
    packets = (aten.le, aten.lt, aten.ge, aten.gt, aten.eq, aten.ne)
    logic = (aten.logical_and, aten.logical_or, aten.logical_xor, aten.bitwise_and, aten.bitwise_or)
    unary = (aten.logical_not.default, aten.bitwise_not.default, aten.isnan.default)
    return {
        **{packet.Scalar: {0: Need.SIGN} for packet in packets},
        **{packet.Tensor: {0: Need.SIGN, 1: Need.SIGN} for packet in packets},
        **{packet.default: {0: Need.SIGN, 1: Need.SIGN} for packet in logic[:3]},
        **{packet.Tensor: {0: Need.SIGN, 1: Need.SIGN} for packet in logic[3:]},
        **{target: {0: Need.SIGN} for target in unary},
    }


COMPARISONS: Mapping[Any, Mapping[int, Need]] = _comparisons()
"""Operators that need signs alone if their result is boolean."""

NEEDS: Mapping[Any, Mapping[int, Need]] = {
    **COMPARISONS,
    # signs
    aten.threshold_backward.default: {1: Need.SIGN},
    aten.leaky_relu_backward.default: {1: Need.SIGN},
    aten.hardtanh_backward.default: {1: Need.SIGN},
    aten.hardsigmoid_backward.default: {1: Need.SIGN},
    aten.where.self: {0: Need.SIGN},
    aten.masked_fill.Scalar: {1: Need.SIGN},
    aten.masked_fill.Tensor: {1: Need.SIGN},
    aten.native_dropout_backward.default: {1: Need.SIGN},
    # sizes
    aten.max_pool2d_with_indices_backward.default: {1: Need.SIZE, 7: Need.POSITION},
    aten.max_pool3d_with_indices_backward.default: {1: Need.SIZE, 7: Need.POSITION},
    aten.adaptive_max_pool2d_backward.default: {1: Need.SIZE, 2: Need.POSITION},
    aten.adaptive_max_pool3d_backward.default: {1: Need.SIZE, 2: Need.POSITION},
    aten.avg_pool2d_backward.default: {1: Need.SIZE},
    aten.avg_pool3d_backward.default: {1: Need.SIZE},
    torch.ops.encore.dropout_noise.default: {0: Need.SIZE},
    torch.ops.encore.dropout_mask.default: {0: Need.SIZE},
    # positions
    torch.ops.encore.max_pool2d_backward.default: {8: Need.POSITION},
    torch.ops.encore.max_pool3d_backward.default: {8: Need.POSITION},
    torch.ops.encore.adaptive_max_pool2d_backward.default: {3: Need.POSITION},
    torch.ops.encore.adaptive_max_pool3d_backward.default: {3: Need.POSITION},
    aten.embedding_dense_backward.default: {1: Need.POSITION},
    aten.nll_loss_backward.default: {2: Need.POSITION},
    aten.nll_loss2d_backward.default: {2: Need.POSITION},
    aten.gather.default: {2: Need.POSITION},
    aten.scatter.src: {2: Need.POSITION},
    aten.scatter.value: {2: Need.POSITION},
    aten.scatter_add.default: {2: Need.POSITION},
    aten.index_select.default: {2: Need.POSITION},
    aten.index_add.default: {2: Need.POSITION},
}
"""Operator -> position of an argument -> what it needs of the tensor there."""


def need_of(op: Op, value: int) -> Need:
    """Return what an operator needs of a value that it reads, the most over all its arguments."""
    needs = NEEDS.get(op.target, {})
    found = [
        needs.get(position, Need.VALUES)
        for position, argument in enumerate(op.args)
        if isinstance(argument, Ref) and argument.value == value
    ]
    alone = len(found) == sum(value in reads for reads in _mentions(op))
    return max(found) if found and alone else Need.VALUES


def _mentions(op: Op) -> list[tuple[int, ...]]:
    """The values in each argument."""
    return [tuple(refs(argument)) for argument in (*op.args, *op.kwargs.values())]


@dataclass(frozen=True, slots=True)
class Reading:
    """A read of a storage in backward, of its owner or through a view."""

    op: Op
    value: int
    need: Need


class BackwardNeeds:
    """The reads in backward of each storage that forward allocates, and what they need."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.of: dict[int, list[Reading]] = {}
        made = {storage for op in graph.ops if op.forward for storage in _storages(graph, op.writes)}
        for op in graph.ops:
            if op.forward or op.kind is OpClass.VIEW:
                continue
            for value in op.reads:
                storage = graph.values[value].storage
                if storage in made:
                    self.of.setdefault(storage, []).append(Reading(op, value, need_of(op, value)))
        leaving = {graph.values[value].storage for value in (*graph.outputs, *graph.gradients) if value is not None}
        writers = (op for op in graph.ops if op.kind is OpClass.MUTATING)
        self.changing = {storage for op in writers for storage in _storages(graph, op.reads)}
        """Storages whose contents change."""
        self.held = graph.external | self.changing | {storage for storage in leaving if storage is not None}
        """Storages that stay alive whatever backward needs: those of the caller, and those that operators write to."""

    def most(self, storage: int) -> Need | None:
        """Return the most that backward needs of a storage; None if it does not read it."""
        return max((reading.need for reading in self.of.get(storage, ())), default=None)

    def is_kept_whole(self, storage: int) -> bool:
        """Return whether its numbers are there in backward, because an operator needs them or the caller keeps them."""
        most = self.most(storage)
        return storage in self.held or (most is not None and most > Need.SIGN)

    def may_be_read(self, storage: int) -> bool:
        """Return whether a rewrite may let backward read it as a whole. Not what the caller keeps: it may write over an
        output, and autograd raises an error only if backward reads that output in eager, too."""
        most = self.most(storage)
        needed = most is not None and most > Need.SIGN
        return storage not in self.changing and (needed or storage not in self.held)


def _storages(graph: Graph, values: Sequence[int | None]) -> list[int]:
    found = (None if value is None else graph.values[value].storage for value in values)
    return [storage for storage in found if storage is not None]
