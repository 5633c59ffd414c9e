"""Heads: a product that turns hidden rows into scores, what happens to each row of scores, and the loss they end in.

Found by data flow, from the product on. Everything computed from its result, in forward or in backward, must treat rows
alike and separately (casts, scaling, soft caps, the logarithm of a softmax and its gradient), or be where rows leave:
the negative log likelihood in forward; in backward a product that keeps rows apart (the gradient of the hidden rows),
one that sums over them (the gradient of the weight), or a sum (of the bias). Such a head can be taken some rows at
a time whatever it computes, since no row ever sees another. Any other reader, and it is no head: it needs the scores of
all rows at once. Scores that the step returns are computed at once, and what follows reads slices of them: the caller
keeps them anyway (the logits of Hugging Face's models).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.ops import OUT_VARIANT, is_pointwise
from encore.graph.values import Ref, is_contiguous, refs
from encore.rewrite.matmuls import Product, product, products
from encore.rewrite.queries import device_of, exported, result_of

aten = torch.ops.aten
LOSS, LOSS_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default

ALONG: dict[object, int] = {aten._log_softmax.default: 1, aten._log_softmax_backward_data.default: 2}
"""Operators along one dimension -> which of their arguments names it."""

RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
})  # fmt: skip
"""Views that leave a contiguous tensor's elements in their order."""


@dataclass(frozen=True, slots=True)
class Exit:
    """An operator of backward that reads rows of a head and makes something else of them."""

    op: Op
    rows: int

    @property
    def result(self) -> int:
        return result_of(self.op)


@dataclass(frozen=True, slots=True)
class RowByRow(Exit):
    """`rows @ right`: each row of the result comes from one row."""

    right: int


@dataclass(frozen=True, slots=True)
class Gathered(Exit):
    """`rows.T @ other` or `other @ rows`, a product that sums over rows; plus `addend`, where it has one."""

    other: int
    turned: bool
    """Whether the rows are on the left, transposed."""
    addend: int | None


@dataclass(frozen=True, slots=True)
class Summed(Exit):
    """The sum of all rows."""


@dataclass(frozen=True, slots=True)
class Head:
    """One head. Its values hold rows of scores, and no operator outside reads them."""

    product: Product
    loss: Op
    makers: dict[int, Op]
    """Every value of the head, and who makes it."""
    exits: tuple[Exit, ...]
    """Where rows leave in backward; none if nothing before the head needs a gradient."""
    whole: frozenset[int] = frozenset()
    """Values of the head that are in memory for all rows from forward on: they, or views of them, are returned."""

    @property
    def backward(self) -> Op:
        """The first of its operators in backward."""
        ops = (*self.makers.values(), *(leave.op for leave in self.exits))
        return min((op for op in ops if not op.forward), key=lambda op: op.id)


def find_heads(graph: Graph) -> Iterator[Head]:
    """The heads of a step, none of which reads what belongs to another."""
    if not any(op.target is LOSS for op in graph.ops):
        return
    leaving = exported(graph)
    taken: set[int] = set()
    for root in products(graph):
        growth = _Growth(graph, root)
        head = growth.head(leaving)
        if head is not None and not taken & growth.outside:
            taken |= growth.inside
            yield head


@dataclass(slots=True)
class _Growth:
    """What is known of a head so far."""

    graph: Graph
    root: Product
    loss: Op | None = None
    makers: dict[int, Op] = field(default_factory=dict)
    transposed: dict[int, int] = field(default_factory=dict)
    """Transposes of its values, and of which: only products that sum over rows may read them."""
    exits: list[Exit] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    """Operators that read what has been taken in."""

    @property
    def inside(self) -> set[int]:
        return {*self.makers, *self.transposed}

    @property
    def outside(self) -> set[int]:
        """What the head reads and does not make."""
        ops = (*self.makers.values(), *(leave.op for leave in self.exits))
        return {value for op in ops for value in op.reads} - self.inside

    def head(self, leaving: set[int]) -> Head | None:
        """Follow all that is computed from the product, in the order of the graph."""
        if not self._may_begin():
            return None
        self._own(self.root.op)
        last = None
        while self.pending:
            number = heapq.heappop(self.pending)
            if number != last and not self._take_in(self.graph.ops[number]):
                return None
            last = number
        if self.loss is None or not self._weight_stays_inside(self.loss):
            return None
        returned = leaving & self.inside
        if not all(value in self.makers and self.makers[value].forward for value in returned):
            return None
        return Head(self.root, self.loss, self.makers, tuple(self.exits), self._whole(returned))

    def _whole(self, returned: set[int]) -> frozenset[int]:
        """The values in whose memory those that are returned lie."""
        storages = {self.graph.values[value].storage for value in returned}
        owners = (value for value, op in self.makers.items() if op.kind is not OpClass.VIEW)
        return frozenset(value for value in owners if self.graph.values[value].storage in storages)

    def _may_begin(self) -> bool:
        """Return whether it is a product of forward in which rows share all but their left sides."""
        scores = self.graph.values[self.root.result]
        shared_bias = self.root.bias is None or len(self.graph.values[self.root.bias].shape) == 1
        return self.root.op.forward and shared_bias and is_contiguous(scores)

    def _take_in(self, op: Op) -> bool:
        """One more operator; False if it has no place in a head."""
        if self._treats_rows_alike(op) or self._begins_backward(op):
            self._own(op)
        elif op.target is LOSS and op.forward and self.loss is None and self._reads_rows_at(op, 0):
            self.loss = op
        elif op.target is aten.t.default and not op.forward and op.reads[0] in self.makers:
            result = result_of(op)
            self.transposed[result] = op.reads[0]
            self._await_readers(result)
        elif (leave := self._exit(op)) is not None:
            self.exits.append(leave)
        else:
            return False
        return True

    def _own(self, op: Op) -> None:
        result = result_of(op)
        self.makers[result] = op
        self._await_readers(result)

    def _await_readers(self, value: int) -> None:
        for reader in self.graph.values[value].readers:
            heapq.heappush(self.pending, reader)

    # -- what an operator does to rows -------------------------------------------------------------------------------

    def _treats_rows_alike(self, op: Op) -> bool:
        """Return whether each row of its result is made from the same rows of the head, and of what all rows share."""
        if op.returns_tuple or op.writes[0] is None or not self._holds_rows(op.writes[0]):
            return False
        if op.kind is OpClass.VIEW:
            return op.target in RESHAPES
        others = [value for value in op.reads if value not in self.makers]
        if op.target in ALONG:
            last = len(self.graph.values[op.reads[0]].shape) - 1
            return not others and op.args[ALONG[op.target]] in (last, -1)
        pointwise = op.kind is OpClass.CHEAP and (is_pointwise(op.target) or op.target in OUT_VARIANT)
        if self.inside.intersection(refs(op.kwargs)):
            return False
        return (pointwise or self._is_cast(op)) and all(self._same_for_all_rows(value) for value in others)

    def _is_cast(self, op: Op) -> bool:
        """To another type, where it is."""
        if op.target is not aten._to_copy.default or not {"dtype", "layout", "device"}.issuperset(op.kwargs):
            return False
        here = torch.device(device_of(self.graph, self.root.result))
        return op.kwargs.get("device", here) == here

    def _holds_rows(self, number: int) -> bool:
        """Return whether it has as many rows, as long and in the same order, as those that the product makes."""
        value, scores = self.graph.values[number], self.graph.values[self.root.result]
        alike = value.shape[-1:] == scores.shape[-1:] and math.prod(value.shape) == math.prod(scores.shape)
        return alike and is_contiguous(value)

    def _same_for_all_rows(self, number: int) -> bool:
        shape = self.graph.values[number].shape
        return number not in self.transposed and (len(shape) < 2 or (len(shape) == 2 and shape[0] == 1))

    def _begins_backward(self, op: Op) -> bool:
        """Return whether it is the gradient of the loss that the head ends in. It may read a copy of the target: labels
        that the step computes are narrowed between forward and backward."""
        if op.target is not LOSS_BACKWARD or op.forward or self.loss is None:
            return False
        _, _, weight, reduction, ignored = self.loss.args
        total = self.loss.writes[1]
        same = total is not None and op.args[3:] == (weight, reduction, ignored, Ref(total))
        target, copy = (self.graph.values[args[place].value] for args, place in ((self.loss.args, 1), (op.args, 2)))
        return same and (target.shape, target.dtype) == (copy.shape, copy.dtype) and self._reads_rows_at(op, 1)

    def _reads_rows_at(self, op: Op, position: int) -> bool:
        """Return whether this argument, and no other, is a matrix of the head."""
        mine = [value for value in op.reads if value in self.inside]
        return not op.kwargs and mine == [op.args[position].value] and len(self.graph.values[mine[0]].shape) == 2

    def _weight_stays_inside(self, loss: Op) -> bool:
        """Return whether the total weight is read by the loss's own gradient only."""
        weight = loss.writes[1]
        if weight is None or weight in exported(self.graph):
            return False
        return {op.id for op in self.makers.values()}.issuperset(self.graph.values[weight].readers)

    def _exit(self, op: Op) -> Exit | None:
        """The way out of the head that an operator of backward is, if it is one."""
        if op.forward or op.returns_tuple or op.writes[0] is None or not is_contiguous(self.graph.values[op.writes[0]]):
            return None
        found = product(op)
        if found is not None and len(op.reads) == len(op.args):  # nothing is read twice
            mine = self.inside.intersection(op.reads)
            if mine == {found.left} and found.left in self.transposed:
                return Gathered(op, self.transposed[found.left], found.right, True, found.bias)
            if mine == {found.right} and found.right in self.makers:
                return Gathered(op, found.right, found.left, False, found.bias)
            if mine == {found.left} and found.bias is None:
                return RowByRow(op, found.left, found.right)
        if op.target is aten.sum.dim_IntList and not op.kwargs and op.reads[0] in self.makers:
            dimensions = len(self.graph.values[op.reads[0]].shape)
            if sorted(number % dimensions for number in op.args[1] or ()) == list(range(dimensions - 1)):
                return Summed(op, op.reads[0])
        return None
