"""Additive attention in a graph, however it was written: `weight . tanh(LayerNorm?(query + keys))`, and its backward.

Found from the tanh. What it reads must be a sum of two values that are spread out over each other's dimensions (and of
a bias, perhaps), normalised or not; what reads it, a product with one vector. Views in between do not matter, nor does
which operator multiplies. In backward, all that reads a value of the middle must be part of the same formula: the
gradient of tanh and of the LayerNorm, the gradient of the vector, and sums back to what had been spread out. Any other
reader, and it is left alone: somebody wants the middle for something else.

Dimensions of the middle must be those that query and keys share, then the query's own, then the keys' own (or the other
way round: the formula is symmetric), as `[B, Tq, Tk, H]` or, in one step of a decoder, `[B, Tk, H]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.values import Ref, is_contiguous
from encore.rewrite.edit import view_strides
from encore.rewrite.matching import NoMatchError, expect, views_and_readers
from encore.rewrite.queries import device_of, exported, replaced_storages
from encore.rnn.layer import TYPES

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.mv.default)
SUM = aten.sum.dim_IntList


@dataclass(slots=True)
class Scoring:
    """One place where queries are held against keys."""

    tanh: Op
    query: int
    keys: int
    """Values that are spread out in the sum; the one with the outer dimensions of its own is called the query."""
    weight: int
    scores: int
    """The value with the scores, as the graph made it."""
    dot: Op
    shape: tuple[int, int, int]
    hidden: int
    bias: int | None = None
    """Added in the middle."""
    offset: int | None = None
    """Added to all scores."""
    norm: Op | None = None
    grad: int | None = None
    """Gradient of the scores, before any spreading out; None where there is no backward."""
    backward: list[Op] = field(default_factory=list)
    """Operators of backward that go."""
    gradients: dict[str, int] = field(default_factory=dict)
    """What leaves in backward, by the name of the operand."""

    @property
    def eps(self) -> float | None:
        return None if self.norm is None else float(self.norm.args[4])


def find_scorings(graph: Graph) -> Iterator[Scoring]:
    """All of them, in order."""
    leaving, changed = exported(graph), replaced_storages(graph)
    for op in graph.ops:
        if op.target is aten.tanh.default and op.forward:
            found = _Match(graph, leaving, changed, op).scoring()
            if found is not None:
                yield found


class _Match:
    """One tanh, and what is known about its surroundings so far."""

    def __init__(self, graph: Graph, leaving: set[int], changed: set[int | None], tanh: Op) -> None:
        self.graph = graph
        self.values = graph.values
        self.leaving = leaving
        self.changed = changed
        self.tanh = tanh
        self.known: int = tanh.writes[0]  # type: ignore[assignment]
        self.middle = self.values[self.known].shape
        self.rows = math.prod(self.middle[:-1])

    def scoring(self) -> Scoring | None:
        try:
            return self._scoring()
        except NoMatchError:
            return None

    def _scoring(self) -> Scoring:
        value = self.values[self.known]
        expect(len(self.middle) >= 2 and self.middle[-1] >= 2 and self.rows >= 1 and value.dtype in TYPES)
        expect(is_contiguous(value) and device_of(self.graph, self.known) == "cpu")
        norm, summed, bias = self._before()
        query, keys, shape = self._spread(summed)
        views, readers = views_and_readers(self.graph, self.known, self.leaving)
        forward = [reader for reader in readers if reader.forward]
        expect(len(forward) == 1)
        weight, dot, offset = self._dot(forward[0], views)
        (scores,) = dot.writes
        assert scores is not None
        expect(is_contiguous(self.values[scores]) and math.prod(self.values[scores].shape) == self.rows)
        operands = [query, keys, weight, *([bias] if bias is not None else [])]
        expect(all(self.values[one].dtype == value.dtype for one in operands))
        affine = [] if norm is None else [one.value for one in norm.args[2:4] if one is not None]
        expect(all(self.values[one].storage not in self.changed for one in (*operands, *affine)))
        expect(self._viewable(weight, (self.middle[-1],)))
        found = Scoring(self.tanh, query, keys, weight, scores, dot, shape, self.middle[-1], bias, offset, norm)
        self._backward(found, summed, [reader for reader in readers if not reader.forward], views)
        return found

    # -- what tanh reads ---------------------------------------------------------------------------------------------

    def _before(self) -> tuple[Op | None, Op, int | None]:
        """The LayerNorm, the addition of query and keys, and a bias, where there is one."""
        operand = self.tanh.reads[0]
        maker = self._maker(operand)
        norm = None
        if maker.target is aten.native_layer_norm.default:
            expect(list(maker.args[1]) == [self.middle[-1]])
            affine = [one.value for one in maker.args[2:4] if one is not None]
            expect(all(self.values[one].dtype == self.values[self.known].dtype for one in affine))
            norm, operand = maker, maker.reads[0]
            maker = self._maker(operand)
        expect(self._is_sum(maker))
        for vector, rest in (maker.reads, maker.reads[::-1]):
            if self._vector(vector, along=-1) is not None and self.values[rest].shape == self.middle:
                inner = self.graph.producer(rest)
                if inner is not None and self._is_sum(inner) and self.values[rest].readers == [maker.id]:
                    expect(rest not in self.leaving)
                    return norm, inner, self._unspread(vector)
        return norm, maker, None

    def _is_sum(self, op: Op) -> bool:
        whole = op.target is aten.add.Tensor and op.forward and not op.kwargs and len(op.args) == len(op.reads) == 2
        return whole and self.values[op.writes[0] or 0].shape == self.middle

    def _spread(self, addition: Op) -> tuple[int, int, tuple[int, int, int]]:
        """Query, keys and the shape of the scores, from how two operands are spread out over the middle."""
        varies = [self._varies(operand) for operand in addition.reads]
        kinds = [pair for pair, size in zip(zip(*varies, strict=True), self.middle[:-1], strict=True) if size > 1]
        order = [(True, True)]
        own = [pair for pair in kinds if pair != (True, True)]
        expect(bool(own))
        first = own[0]
        second = (first[1], first[0])
        order += [first, second]
        expect((False, False) not in kinds and kinds == sorted(kinds, key=order.index))
        sizes = dict.fromkeys(order, 1)
        for pair, size in zip(zip(*varies, strict=True), self.middle[:-1], strict=True):
            if size > 1:
                sizes[pair] *= size
        outer, inner = (self._unspread(addition.reads[pair.index(True)]) for pair in (first, second))
        if second not in kinds:  # one step of a decoder: the other one has no dimensions of its own
            first, second, outer, inner = second, first, inner, outer
        shape = sizes[True, True], sizes[first], sizes[second]
        expect(math.prod(self.values[outer].shape) == shape[0] * shape[1] * self.middle[-1])
        expect(math.prod(self.values[inner].shape) == shape[0] * shape[2] * self.middle[-1])
        expect(self._viewable(outer, (shape[0], shape[1], self.middle[-1])))
        expect(self._viewable(inner, (shape[0], shape[2], self.middle[-1])))
        return outer, inner, shape

    def _viewable(self, number: int, shape: tuple[int, ...]) -> bool:
        return view_strides(self.values[number], shape) is not None

    def _varies(self, number: int) -> list[bool]:
        """Along which dimensions of the middle, the last one aside, does an operand change?"""
        value = self.values[number]
        missing = len(self.middle) - len(value.shape)
        expect(bool(value.shape) and value.shape[-1] == self.middle[-1] and value.stride[-1] != 0)
        pairs = zip(value.shape[:-1], value.stride[:-1], strict=True)
        return [False] * missing + [size > 1 and stride != 0 for size, stride in pairs]

    def _unspread(self, number: int) -> int:
        """The value before it was expanded."""
        while (maker := self.graph.producer(number)) is not None and maker.target is aten.expand.default:
            number = maker.reads[0]
        return number

    # -- what reads it in forward ------------------------------------------------------------------------------------

    def _dot(self, op: Op, views: Sequence[int]) -> tuple[int, Op, int | None]:
        """The vector, the operator that makes the scores, and what it adds to all of them."""
        if op.target is aten.mul.Tensor:
            weight = self._other(op, views)
            (product,) = op.writes
            assert product is not None
            last = self._only_reader(product)
            expect(last.forward and self._sums(last) == {len(self.middle) - 1} and self._shape(product) == self.middle)
            expect(self._vector(weight, along=-1) is not None)
            return self._unspread(weight), last, None
        expect(op.target in PRODUCTS and not op.kwargs)
        *offset, left, right = (argument.value for argument in op.args)
        along = -1 if op.target is aten.mv.default else -2
        expect(left in views and self._holds_rows(left) and self._vector(right, along=along) is not None)
        if offset:
            expect(math.prod(self._shape(offset[0])) == 1)
        return self._unspread(right), op, offset[0] if offset else None

    def _holds_rows(self, number: int) -> bool:
        """Is it the whole middle, row after row?"""
        whole = math.prod(self._shape(number)) == math.prod(self.middle)
        return whole and self._shape(number)[-1] == self.middle[-1] and is_contiguous(self.values[number])

    def _holds_columns(self, number: int) -> bool:
        """Is it the whole middle as one matrix, transposed?"""
        value = self.values[number]
        return value.shape[-2:] == (self.middle[-1], self.rows) and value.stride[-2:] == (1, self.middle[-1])

    def _vector(self, number: int, along: int | None = None) -> tuple[int | None, int, int] | None:
        """A value that holds one vector as long as a row (along this dimension), by where its numbers lie; None for
        any other."""
        value = self.values[number]
        long = [place for place, size in enumerate(value.shape) if size > 1 and value.stride[place] != 0]
        if len(long) != 1 or value.shape[long[0]] != self.middle[-1]:
            return None
        if along is not None and long[0] != len(value.shape) + along:
            return None
        return value.storage, value.offset, value.stride[long[0]]

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, found: Scoring, addition: Op, readers: Sequence[Op], views: Sequence[int]) -> None:
        """Fill in gradients, or find that somebody else looks at the middle."""
        through = [op for op in readers if op.target is aten.tanh_backward.default]
        to_weight = [op for op in readers if op not in through]
        expect(len(through) <= 1 and len(to_weight) <= 1)
        if through:
            expect(through[0].args[1] == Ref(self.known))
            found.grad = self._gradient_of_scores(found, through[0])
        if to_weight:
            self._gradient_of_weight(found, to_weight[0], views)
        self._not_elsewhere(found, addition, through)
        if through:
            (gradient,) = through[0].writes
            assert gradient is not None
            if found.norm is not None:
                gradient = self._through_norm(found, gradient)
            self._back_to_operands(found, addition, gradient)
            found.backward += through
        found.backward += to_weight

    def _gradient_of_scores(self, found: Scoring, through: Op) -> int:
        """What the gradient of tanh was multiplied from, beside the vector."""
        number = through.reads[0]
        while (maker := self._maker(number)).kind is OpClass.VIEW:
            self._only_reader(number)
            number = maker.reads[0]
        self._only_reader(number)
        expect(not maker.forward and not maker.kwargs and len(maker.reads) == len(maker.args) == 2)
        expect(math.prod(self._shape(number)) == math.prod(self.middle))
        pairs = [maker.reads]
        if maker.target is aten.mul.Tensor:
            pairs.append(maker.reads[::-1])
        else:
            expect(maker.target in (aten.mm.default, aten.bmm.default))
        for grad, vector in pairs:
            inner = self._unspread(grad)
            same = self._vector(vector, along=-1) == self._vector(found.weight)
            if same and self._is_gradient(inner) and self._shape(inner)[-1] == 1:
                found.backward.append(maker)
                return inner
        raise NoMatchError

    def _is_gradient(self, number: int) -> bool:
        """One number a row, one after the other?"""
        return math.prod(self._shape(number)) == self.rows and is_contiguous(self.values[number])

    def _gradient_of_weight(self, found: Scoring, op: Op, views: Sequence[int]) -> None:
        grad = self._unspread(self._other(op, views))
        expect(self._is_gradient(grad) and not op.kwargs)
        if found.grad is None:
            found.grad = grad
        same = (self.values[grad].storage, self.values[grad].offset)
        expect(same == (self.values[found.grad].storage, self.values[found.grad].offset))
        (mine,) = (value for value in op.reads if value in views)
        (result,) = op.writes
        assert result is not None
        if op.target is aten.mul.Tensor:
            expect(self._shape(mine) == self._shape(result) == self.middle and self._shape(grad)[-1] == 1)
            last = self._only_reader(result)
            expect(self._sums(last) == {place for place, size in enumerate(self.middle[:-1]) if size > 1})
            found.backward.append(op)
            (result,) = last.writes
            assert result is not None
        elif op.target is aten.mv.default or op.reads[0] == mine:
            expect(op.target in PRODUCTS and op.reads[0] == mine and self._holds_columns(mine))
        else:
            expect(op.target in PRODUCTS and self._holds_rows(mine))
        expect(math.prod(self._shape(result)) == self.middle[-1] and is_contiguous(self.values[result]))
        found.gradients["weight"] = result

    def _not_elsewhere(self, found: Scoring, addition: Op, through: Sequence[Op]) -> None:
        """Nobody else reads sums, or what a LayerNorm made of them."""
        norm_backward: set[int] = set()
        if found.norm is not None and through:
            norm_backward = set(self.values[through[0].writes[0] or 0].readers)
        inner = [value for op in (addition, found.norm) if op is not None for value in op.writes if value is not None]
        allowed = {self.tanh.id, *norm_backward, *([found.norm.id] if found.norm is not None else [])}
        if found.bias is not None:
            inner.append(self.tanh.reads[0] if found.norm is None else found.norm.reads[0])
            allowed.add(self.graph.values[inner[-1]].producer or 0)
        for value in inner:
            expect(value not in self.leaving and allowed.issuperset(self.values[value].readers))

    def _through_norm(self, found: Scoring, gradient: int) -> int:
        op = self._only_reader(gradient)
        assert found.norm is not None
        total, mean, rate = found.norm.reads[0], *found.norm.writes[1:]
        expect(op.target is aten.native_layer_norm_backward.default and not op.forward)
        assert mean is not None
        assert rate is not None
        expect(op.args[:2] == (Ref(gradient), Ref(total)) and op.args[3:5] == (Ref(mean), Ref(rate)))
        for name, argument, value in zip(("norm_weight", "norm_bias"), op.args[5:7], op.writes[1:], strict=True):
            if argument is not None and value is not None and (self.values[value].readers or value in self.leaving):
                found.gradients[name] = value
        found.backward.append(op)
        inner = op.writes[0]
        expect(inner is not None)
        assert inner is not None
        return inner

    def _back_to_operands(self, found: Scoring, addition: Op, gradient: int) -> None:
        """Sums over dimensions along which an operand was spread out; the gradient itself for one that was not."""
        wanted: dict[str, set[int]] = {}
        large = {place for place, size in enumerate(self.middle[:-1]) if size > 1}
        for operand in addition.reads:
            varies = self._varies(operand)
            name = "query" if self._unspread(operand) == found.query else "keys"
            wanted[name] = {place for place in large if not varies[place]}
        if found.bias is not None:
            wanted["bias"] = large
        expect(is_contiguous(self.values[gradient]))
        others = []
        for reader in (self.graph.ops[number] for number in self.values[gradient].readers):
            names = [name for name, places in wanted.items() if places and self._sums(reader) == places]
            (result,) = reader.writes if len(reader.writes) == 1 else (None,)
            if len(names) == 1 and names[0] not in found.gradients and result is not None:
                expect(is_contiguous(self.values[result]))
                found.gradients[names[0]] = result
                found.backward.append(reader)
            else:
                others.append(reader)
        whole = [name for name, places in wanted.items() if not places]
        if whole:
            if others or gradient in self.leaving:
                found.gradients[whole[0]] = gradient
        else:
            expect(not others and gradient not in self.leaving)

    # -- small questions ---------------------------------------------------------------------------------------------

    def _maker(self, number: int) -> Op:
        op = self.graph.producer(number)
        if op is None:
            raise NoMatchError
        return op

    def _shape(self, number: int) -> tuple[int, ...]:
        return self.values[number].shape

    def _only_reader(self, number: int) -> Op:
        expect(len(self.values[number].readers) == 1 and number not in self.leaving)
        return self.graph.ops[self.values[number].readers[0]]

    def _sums(self, op: Op) -> set[int] | None:
        """Dimensions larger than 1 that an operator sums over, if that is all it does."""
        if op.target is not SUM or op.kwargs or op.args[1] is None:
            return None
        shape = self._shape(op.reads[0])
        return {place % len(shape) for place in op.args[1] if shape[place % len(shape)] > 1}

    def _other(self, op: Op, views: Sequence[int]) -> int:
        """The operand that is not the middle."""
        mine = [value for value in op.reads if value in views]
        others = [value for value in op.reads if value not in views]
        expect(len(mine) == 1 and len(others) == 1 and len(op.args) == 2)
        expect(math.prod(self._shape(mine[0])) == math.prod(self.middle))
        return others[0]
