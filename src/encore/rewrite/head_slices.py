"""A head taken some rows at a time, so that a slice of its scores is all that ever lives.

Over a vocabulary of V words, N positions have N x V scores: of these a step keeps the logarithms of the softmax from
forward to backward, and there two gradients next to them; in a language model nothing else may be as large. Taken in K
slices, forward computes the scores of a slice and its part of the loss, and forgets the scores; backward computes
them once more from the hidden rows, then the slice's gradients, adds its share to those of weight and bias and writes
its rows of the gradient of the hidden rows. The price is the head's product, run a second time; scores that the step
returns are there already, and backward reads slices of those. It is exact for any gradient of the loss; sums over rows
are taken in another order.

Liger (Hsu et al. 2024) and cut cross entropy (Wijmans et al. 2024) do this in kernels of their own, for heads that are
written for them; here it is the graph that changes, whatever the model calls its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.editor import Editor
from encore.graph.values import Ref, contiguous_strides, map_refs
from encore.rewrite.heads import ALONG, LOSS, LOSS_BACKWARD, Exit, Gathered, Head, RowByRow, Summed, find_heads
from encore.rewrite.queries import device_of

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""How a loss is reduced, in PyTorch's numbers."""
NARROW = (torch.bfloat16, torch.float16)
"""Types too coarse to add up slices in: their sums are taken in float32."""


def split_head(graph: Graph, slices: int) -> Graph:
    """The graph with its heads in `slices` slices of rows, the last of which may be shorter; no slice is empty, so that
    few rows make fewer slices. The same graph where there is no head to split."""
    editor = Editor(graph)
    for head in find_heads(graph):
        rows = graph.values[head.product.result].shape[0]
        size = -(-rows // slices)
        if size < rows:
            split = _Split(editor, head, size)
            split.forward()
            split.backward()
    return editor.finish()


class _Split:
    """One head on its way into slices. All new operators of a phase belong in one place, in the order in which
    they are made: slice after slice."""

    def __init__(self, editor: Editor, head: Head, size: int) -> None:
        self.editor = editor
        self.values = editor.graph.values
        self.head = head
        rows, self.columns = self.values[head.product.result].shape
        self.device = device_of(editor.graph, head.product.result)
        self.size = size
        self.starts = range(0, rows, size)
        self.lengths = [min(size, rows - start) for start in self.starts]
        self.last = len(self.lengths) - 1
        self.cuts: dict[tuple[int, int], list[int]] = {}
        """Slices of what is not the head's own, by value and dimension."""
        self.made: dict[tuple[int, int, bool], int] = {}
        """Slices of the head's values, by value, slice and whether forward makes them."""
        self.matrices: dict[int, int] = {}
        """Values that are in memory for all rows -> the same in two dimensions."""
        self.so_far: dict[int, int] = {}
        """What the result of an exit has come to after the slices so far."""
        self.total_weight = -1

    def forward(self) -> None:
        """The loss of every slice, then the loss."""
        loss = self.head.loss
        scores, target, weight, reduction, ignored = loss.args
        output, _ = loss.writes
        assert output is not None
        losses, weights = [], []
        for k, length in enumerate(self.lengths):
            rows = (Ref(self._slice(scores.value, k, loss)), Ref(self._cut(target.value, k, loss)))
            how = NONE if reduction == NONE else SUM
            part = self._op(loss, f"{loss.name}_rows{k}", LOSS, (*rows, weight, how, ignored))
            part.returns_tuple = True
            losses.append(self._result(part, (length,) if reduction == NONE else (), output))
            weights.append(self._result(part, (), output))
            self.values[weights[-1]].name += "_weight"
        if reduction == NONE:
            self.total_weight = weights[0]  # backward takes one and does not look at it
            whole = self._op(loss, f"{loss.name}_whole", aten.cat.default, ([Ref(part) for part in losses],))
        else:
            self.total_weight = self._result(self._sum(weights, "weight"), (), output)
            whole = self._sum(losses, "sum")
        if reduction == MEAN:
            total = self._result(whole, (), output)
            whole = self._op(loss, f"{loss.name}_mean", aten.div.Tensor, (Ref(total), Ref(self.total_weight)))
        self.editor.adopt(whole, output)

    def backward(self) -> None:
        """Every slice through all exits before the next begins."""
        for k in range(len(self.lengths)):
            for leave in self.head.exits:
                rows = self._slice(leave.rows, k, self.head.backward)
                match leave:
                    case RowByRow():
                        self._write_rows(leave, k, rows)
                    case Gathered():
                        self._add_product(leave, k, rows)
                    case Summed():
                        self._add_sum(leave, k, rows)

    def _sum(self, parts: Sequence[int], what: str) -> Op:
        """The sum of numbers: of all at once, which rounds less than one after the other."""
        loss = self.head.loss
        stack = self._op(loss, f"{loss.name}_{what}s", aten.stack.default, ([Ref(part) for part in parts],))
        stacked = self._result(stack, (len(parts),), parts[0])
        return self._op(loss, f"{loss.name}_{what}", aten.sum.default, (Ref(stacked),))

    # -- slices ------------------------------------------------------------------------------------------------------

    def _slice(self, value: int, k: int, neighbour: Op) -> int:
        """Slice `k` of one of the head's values, as a matrix, computed in the phase of `neighbour`."""
        op = self.head.makers[value]
        if op.kind is OpClass.VIEW:
            return self._slice(op.reads[0], k, neighbour)
        if value in self.head.whole:
            return self._cut(self._as_matrix(value), k, neighbour)
        key = (value, k, neighbour.forward)
        if key not in self.made:
            args = self._arguments(op, k, neighbour)
            name = f"{op.name}_{'rows' if op.forward == neighbour.forward else 'again'}{k}"
            copy = self._op(neighbour, name, op.target, args, **op.kwargs)
            copy.module, copy.source = op.module, op.source
            self.made[key] = self._result(copy, (self.lengths[k], self.columns), value)
        return self.made[key]

    def _arguments(self, op: Op, k: int, neighbour: Op) -> Sequence[Any]:
        """An operator's arguments for one slice."""

        def here(value: int) -> Ref:
            return Ref(self._slice(value, k, neighbour) if value in self.head.makers else value)

        if op is self.head.product.op:
            *bias, left, right = op.args
            return (*bias, Ref(self._cut(left.value, k, neighbour)), right)
        if op.target is LOSS_BACKWARD:
            gradient, scores, target, *settings, _ = op.args
            _, reduction, _ = settings
            gradient = Ref(self._cut(gradient.value, k, neighbour)) if reduction == NONE else gradient
            target = Ref(self._cut(target.value, k, neighbour))
            return (gradient, here(scores.value), target, *settings, Ref(self.total_weight))
        args = list(map_refs(op.args, here))
        if op.target in ALONG:
            args[ALONG[op.target]] = 1
        return args

    def _cut(self, value: int, k: int, neighbour: Op, dimension: int = 0) -> int:
        """Slice `k` of a value that is not the head's own: a view."""
        if (value, dimension) not in self.cuts:
            whole = self.values[value]
            op = self._op(neighbour, f"{whole.name}_cut", aten.split.Tensor, (Ref(value), self.size, dimension))
            op.returns_tuple = True
            views = []
            for start, length in zip(self.starts, self.lengths, strict=True):
                shape = (*whole.shape[:dimension], length, *whole.shape[dimension + 1 :])
                views.append(self.editor.view_result(op, value, shape, whole.stride, start * whole.stride[dimension]))
            self.cuts[value, dimension] = views
        return self.cuts[value, dimension][k]

    def _as_matrix(self, value: int) -> int:
        """A value that is in memory for all rows, in two dimensions."""
        if value not in self.matrices:
            shape = (sum(self.lengths), self.columns)
            self.matrices[value] = self.editor.viewed(self.head.loss, value, shape).value
        return self.matrices[value]

    # -- exits -------------------------------------------------------------------------------------------------------

    def _write_rows(self, leave: RowByRow, k: int, rows: int) -> None:
        """Into memory for all rows, there from the first slice on: a `cat` in the end would allocate them twice."""
        shape = self.values[leave.result].shape
        part = self._exit_op(leave, f"rows{k}", aten.mm.default, (Ref(rows), Ref(leave.right)))
        made = self._result(part, (self.lengths[k], shape[1]), leave.result)
        if k == 0:
            room = self._exit_op(leave, "room", aten.new_empty.default, (Ref(leave.right), list(shape)))
            self.so_far[leave.op.id] = self._result(room, shape, leave.result)
        start = self.starts[k]
        window = (self._so_far(leave), Ref(made), 0, start, start + self.lengths[k])
        self._come_to(leave, k, self._exit_op(leave, f"upto{k}", aten.slice_scatter.default, window))

    def _add_product(self, leave: Gathered, k: int, rows: int) -> None:
        other = Ref(self._cut(leave.other, k, self.head.backward, 0 if leave.turned else 1))
        operands = (Ref(self._turn(leave, k, rows)), other) if leave.turned else (other, Ref(rows))
        if self.values[leave.result].dtype in NARROW:
            self._add(leave, k, self._exit_op(leave, f"rows{k}", aten.mm.default, operands))
        elif k == 0:
            self._come_to(leave, k, self._exit_op(leave, f"upto{k}", aten.mm.default, operands))
        else:
            terms = (self._so_far(leave), *operands)
            self._come_to(leave, k, self._exit_op(leave, f"upto{k}", aten.addmm.default, terms))

    def _turn(self, leave: Gathered, k: int, rows: int) -> int:
        op = self._exit_op(leave, f"t{k}", aten.t.default, (Ref(rows),))
        value = self.values[rows]
        return self.editor.view_result(op, rows, value.shape[::-1], value.stride[::-1], 0)

    def _add_sum(self, leave: Summed, k: int, rows: int) -> None:
        """A slice is given as many dimensions as the original has: then so does the sum."""
        more = len(self.values[leave.rows].shape) - 2
        if more:
            shape = (*[1] * more, self.lengths[k], self.columns)
            view = self._exit_op(leave, f"view{k}", aten.view.default, (Ref(rows), list(shape)))
            rows = self.editor.view_result(view, rows, shape, contiguous_strides(shape), 0)
        self._add(leave, k, self._exit_op(leave, f"rows{k}", leave.op.target, (Ref(rows), *leave.op.args[1:])))

    def _add(self, leave: Exit, k: int, part: Op) -> None:
        """Add the part of a slice to those before it."""
        whole = self.values[leave.result]
        wide = torch.float32 if whole.dtype in NARROW else None
        made = self._result(part, whole.shape, whole.id)
        if k > 0:
            add = self._exit_op(leave, f"upto{k}", aten.add.Tensor, (self._so_far(leave), Ref(made)))
            self._come_to(leave, k, add, wide)
        elif wide is not None:
            widen = self._exit_op(leave, f"upto{k}", aten._to_copy.default, (Ref(made),), dtype=wide)
            self._come_to(leave, k, widen, wide)
        else:
            self.so_far[leave.op.id] = made
        if wide is not None and k == self.last:
            narrow = self._exit_op(leave, "whole", aten._to_copy.default, (self._so_far(leave),), dtype=whole.dtype)
            self._come_to(leave, k, narrow)

    def _so_far(self, leave: Exit) -> Ref:
        return Ref(self.so_far[leave.op.id])

    def _come_to(self, leave: Exit, k: int, op: Op, wide: torch.dtype | None = None) -> None:
        """After the last slice the operator makes the exit's result, before that what it has come to so far. What a
        product is added to joins last: it may well wait for the gradients of the hidden rows."""
        done = k == self.last and wide is None
        addend = leave.addend if isinstance(leave, Gathered) else None
        if not done or addend is not None:
            self.so_far[leave.op.id] = self._result(op, self.values[leave.result].shape, leave.result, wide)
        if done and addend is not None:
            op = self._exit_op(leave, "and", aten.add.Tensor, (self._so_far(leave), Ref(addend)))
        if done:
            self.editor.adopt(op, leave.result)

    # -- records -----------------------------------------------------------------------------------------------------

    def _op(self, neighbour: Op, name: str, target: Any, args: Sequence[Any], **kwargs: Any) -> Op:
        return self.editor.op_after(neighbour, name, target, args, kwargs)

    def _exit_op(self, leave: Exit, what: str, target: Any, args: Sequence[Any], **kwargs: Any) -> Op:
        op = self._op(self.head.backward, f"{leave.op.name}_{what}", target, args, **kwargs)
        op.module, op.source = leave.op.module, leave.op.source
        return op

    def _result(self, op: Op, shape: Sequence[int], like: int, dtype: torch.dtype | None = None) -> int:
        dtype = dtype or self.values[like].dtype
        assert dtype is not None
        return self.editor.result(op, shape, dtype, self.device)
