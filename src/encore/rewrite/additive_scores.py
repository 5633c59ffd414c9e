"""Additive attention in a graph, however it was written: `weight . tanh(LayerNorm?(query + keys))`, and its backward.

Found from the product with one vector. What it reads must be a tanh of a sum of two values that are spread out over
each other's dimensions (and of a bias, perhaps), normalised or not. Views in between do not matter, nor does which
operator multiplies. In backward, all that reads a value of the middle must be part of the same formula: the gradient of
tanh and of the LayerNorm, the gradient of the vector, and sums back to what had been spread out. Where anything else
reads it, the scores are left as they are.

Dimensions of the middle must be those that query and keys share, then the query's own, then the keys' own (or the other
way round: the formula is symmetric), as `[B, Tq, Tk, H]` or, in one step of a decoder, `[B, Tk, H]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from encore.graph import Graph, Op
from encore.graph.editor import view_strides
from encore.graph.values import is_contiguous
from encore.rewrite.matching import (
    AnyTensor,
    Argument,
    Match,
    OneOf,
    OpPattern,
    Scope,
    Views,
    matches,
)
from encore.rewrite.queries import device_of, readers_of, replaced_storages, result_of
from encore.rewrite.walking import NoMatchError, expect, views_and_readers
from encore.rnn.layer import TYPES

aten = torch.ops.aten
SUM = aten.sum.dim_IntList
MATRIX_PRODUCTS = (aten.mm.default, aten.bmm.default)

# -- patterns ----------------------------------------------------------------------------------------------------------

QUERY_AND_KEYS = AnyTensor("sum", OpPattern(aten.add.Tensor, AnyTensor("one"), AnyTensor("two"), forward=True))
WITH_BIAS = AnyTensor(
    "biased", OpPattern(aten.add.Tensor, QUERY_AND_KEYS, AnyTensor("bias"), commutes=True, forward=True)
)
TOTAL = OneOf(WITH_BIAS, QUERY_AND_KEYS)
NORM = OpPattern(aten.native_layer_norm.default, TOTAL, Argument("sizes"), ..., name="norm")
TANH = AnyTensor("tanh", OpPattern(aten.tanh.default, OneOf(NORM, TOTAL), forward=True))
WEIGHT, ROWS = AnyTensor("weight"), AnyTensor("rows", Views(TANH))
WEIGHTED = OpPattern(aten.mul.Tensor, ROWS, WEIGHT, commutes=True, name="weighted", only_use=True, forward=True)
DOTS = (
    OpPattern(SUM, WEIGHTED, ..., forward=True),
    OpPattern((*MATRIX_PRODUCTS, aten.mv.default), ROWS, WEIGHT, forward=True),
    OpPattern(aten.addmm.default, AnyTensor("offset"), ROWS, WEIGHT, forward=True),
)

GRAD, VECTOR = AnyTensor("grad"), AnyTensor("vector")
SPREAD_GRAD = OneOf(
    OpPattern(aten.mul.Tensor, GRAD, VECTOR, commutes=True, name="spread", only_use=True, forward=False),
    OpPattern(MATRIX_PRODUCTS, GRAD, VECTOR, name="spread", only_use=True, forward=False),
)
THROUGH_TANH = OpPattern(aten.tanh_backward.default, Views(SPREAD_GRAD, only_use=True), AnyTensor("tanh"))
THROUGH_NORM = OpPattern(
    aten.native_layer_norm_backward.default, AnyTensor("gradient"), AnyTensor("total"), Argument(""),
    AnyTensor("mean"), AnyTensor("rate"), ..., forward=False,
)  # fmt: skip

# -- what is found -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AdditiveScores:
    """One place where queries are compared with keys."""

    tanh: Op
    query: int
    keys: int
    """Values that are spread out in the sum; the one with the outer dimensions of its own is called the query."""
    weight: int
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
    """Operators of backward that are replaced."""
    gradients: dict[str, int] = field(default_factory=dict)
    """What backward returns, by the name of the operand."""

    @property
    def scores(self) -> int:
        return result_of(self.dot)

    @property
    def eps(self) -> float | None:
        return None if self.norm is None else float(self.norm.args[4])

    @property
    def affine(self) -> tuple[Any, Any]:
        """Weight and bias of the LayerNorm, as they stand in its arguments."""
        return (None, None) if self.norm is None else self.norm.args[2:4]


def find_additive_scores(graph: Graph) -> Iterator[AdditiveScores]:
    """All of them, in order."""
    scope, replaced = Scope(graph), replaced_storages(graph)
    for op in graph.ops:
        for match in (match for dot in DOTS for match in matches(scope, dot, op)):
            search = _ScoreSearch(match, replaced)
            if search.has_vectors():
                try:
                    found = search.found()
                except NoMatchError:
                    break
                yield found
                break


class _ScoreSearch:
    """One product with a vector, and what is known about the operators around it so far."""

    def __init__(self, dot: Match, replaced: set[int | None]) -> None:
        self.scope = dot.scope
        self.graph = dot.graph
        self.values = dot.graph.values
        self.replaced = replaced
        self.dot = dot
        self.tanh = dot.value("tanh")
        self.middle = self.tanh.shape
        self.hidden = self.middle[-1] if self.middle else 0
        self.rows = math.prod(self.middle[:-1])
        self.large = {place for place, size in enumerate(self.middle[:-1]) if size > 1}
        """Dimensions of the middle that count, but for the last one."""

    def has_vectors(self) -> bool:
        """Return whether the bias is one, if there is one: else it is a query or keys, and another match has it so."""
        if len(self.middle) < 2 or self.hidden < 2 or self.rows < 1:
            return False
        bias, inner = self.dot.captures.get("bias"), self.dot["sum"]
        if bias is None:
            return True
        vector = self._vector(bias, along=-1) is not None and self.values[inner].shape == self.middle
        return vector and self.scope.is_read_once(inner)

    def found(self) -> AdditiveScores:
        dot, tanh = self.dot, self.tanh
        expect(tanh.dtype in TYPES and is_contiguous(tanh) and device_of(self.graph, tanh.id) == "cpu")
        query, keys, shape = self._spread((dot["one"], dot["two"]))
        self._check_dot()
        bias = dot.captures.get("bias")
        maker = self.graph.producer(tanh.id)
        assert maker is not None
        found = AdditiveScores(
            maker, query, keys, self._unspread(dot["weight"]), dot.op, shape, self.hidden,
            None if bias is None else self._unspread(bias), dot.captures.get("offset"), dot.captures.get("norm"),
        )  # fmt: skip
        scores = self.values[found.scores]
        expect(is_contiguous(scores) and math.prod(scores.shape) == self.rows)
        expect(found.norm is None or list(dot["sizes"]) == [self.hidden])
        operands = [found.query, found.keys, found.weight, found.bias, *(one and one.value for one in found.affine)]
        for operand in (self.values[one] for one in operands if one is not None):
            expect(operand.dtype == tanh.dtype and operand.storage not in self.replaced)
        expect(self._viewable(found.weight, (self.hidden,)))
        self._backward(found)
        return found

    # -- forward -------------------------------------------------------------------------------------------------------

    def _spread(self, operands: Sequence[int]) -> tuple[int, int, tuple[int, int, int]]:
        """Query, keys and the shape of the scores, from how two operands are spread out over the middle."""
        expect(self.values[self.dot["sum"]].shape == self.middle)
        varies = [self._varies(operand) for operand in operands]
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
        outer, inner = (self._unspread(operands[pair.index(True)]) for pair in (first, second))
        if second not in kinds:  # one step of a decoder: the other one has no dimensions of its own
            first, second, outer, inner = second, first, inner, outer
        shape = sizes[True, True], sizes[first], sizes[second]
        expect(self._viewable(outer, (shape[0], shape[1], self.hidden)))
        expect(self._viewable(inner, (shape[0], shape[2], self.hidden)))
        return outer, inner, shape

    def _viewable(self, number: int, shape: tuple[int, ...]) -> bool:
        return view_strides(self.values[number], shape) is not None

    def _varies(self, number: int) -> list[bool]:
        """Along which dimensions of the middle, but for the last one, an operand changes."""
        value = self.values[number]
        missing = len(self.middle) - len(value.shape)
        expect(bool(value.shape) and value.shape[-1] == self.hidden and value.stride[-1] != 0)
        pairs = zip(value.shape[:-1], value.stride[:-1], strict=True)
        return [False] * missing + [size > 1 and stride != 0 for size, stride in pairs]

    def _unspread(self, number: int) -> int:
        """The value before it was expanded."""
        while (maker := self.graph.producer(number)) is not None and maker.target is aten.expand.default:
            number = maker.reads[0]
        return number

    def _check_dot(self) -> None:
        """Expect the product to be one of every row of the middle with one vector."""
        dot = self.dot
        weighted, offset = dot.captures.get("weighted"), dot.captures.get("offset")
        if weighted is not None:
            expect(self._shape(result_of(weighted)) == self.middle and self._sums(dot.op) == {len(self.middle) - 1})
            expect(math.prod(self._shape(dot["rows"])) == math.prod(self.middle))
        else:
            expect(self._holds_rows(dot["rows"]))
        along = -1 if weighted is not None or dot.op.target is aten.mv.default else -2
        expect(self._vector(dot["weight"], along=along) is not None)
        expect(offset is None or math.prod(self._shape(offset)) == 1)

    def _holds_rows(self, number: int) -> bool:
        """Return whether it is the whole middle, row after row."""
        whole = math.prod(self._shape(number)) == math.prod(self.middle)
        return whole and self._shape(number)[-1] == self.hidden and is_contiguous(self.values[number])

    def _holds_columns(self, number: int) -> bool:
        """Return whether it is the whole middle as one matrix, transposed."""
        value = self.values[number]
        return value.shape[-2:] == (self.hidden, self.rows) and value.stride[-2:] == (1, self.hidden)

    def _vector(self, number: int, along: int | None = None) -> tuple[int | None, int, int] | None:
        """A value that has one vector as long as a row (along this dimension), by where its numbers lie; None for any
        other."""
        value = self.values[number]
        long = [place for place, size in enumerate(value.shape) if size > 1 and value.stride[place] != 0]
        if len(long) != 1 or value.shape[long[0]] != self.hidden:
            return None
        if along is not None and long[0] != len(value.shape) + along:
            return None
        return value.storage, value.offset, value.stride[long[0]]

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, found: AdditiveScores) -> None:
        """Fill in gradients, or find that something else reads the middle."""
        views, readers = views_and_readers(self.graph, self.tanh.id, self.scope.leaving)
        forward = [op for op in readers if op.forward]
        expect(forward == [self.dot.captures.get("weighted", self.dot.op)])
        through = [op for op in readers if op.target is aten.tanh_backward.default and not op.forward]
        to_weight = [op for op in readers if op not in (*through, *forward)]
        expect(len(through) <= 1 and len(to_weight) <= 1)
        for op in through:
            found.grad = self._gradient_of_scores(found, op)
        for op in to_weight:
            self._gradient_of_weight(found, op, views)
        self._check_middle(found, [reader for op in through for reader in readers_of(self.graph, result_of(op))])
        for op in through:
            gradient = result_of(op)
            self._back_to_operands(found, self._through_norm(found, gradient) if found.norm else gradient)
        found.backward += [*through, *to_weight]

    def _gradient_of_scores(self, found: AdditiveScores, through: Op) -> int:
        """What the gradient of tanh was multiplied from, by the vector."""
        for match in matches(self.scope, THROUGH_TANH, through, {"tanh": self.tanh.id}):
            inner = self._unspread(match["grad"])
            same = self._vector(match["vector"], along=-1) == self._vector(found.weight)
            whole = math.prod(self._shape(result_of(match["spread"]))) == math.prod(self.middle)
            if same and whole and self._is_gradient(inner) and self._shape(inner)[-1] == 1:
                found.backward.append(match["spread"])
                return inner
        raise NoMatchError

    def _is_gradient(self, number: int) -> bool:
        """Return whether it is one number a row, one after the other."""
        return math.prod(self._shape(number)) == self.rows and is_contiguous(self.values[number])

    def _gradient_of_weight(self, found: AdditiveScores, op: Op, views: Sequence[int]) -> None:
        mine = [value for value in op.reads if value in views]
        others = [value for value in op.reads if value not in views]
        expect(len(mine) == len(others) == 1 and len(op.args) == 2 and not op.kwargs)
        (rows,), grad, result = mine, self._unspread(others[0]), result_of(op)
        expect(math.prod(self._shape(rows)) == math.prod(self.middle) and self._is_gradient(grad))
        if found.grad is None:
            found.grad = grad
        known = self.values[found.grad]
        expect((self.values[grad].storage, self.values[grad].offset) == (known.storage, known.offset))
        if op.target is aten.mul.Tensor:
            expect(self._shape(rows) == self._shape(result) == self.middle and self._shape(grad)[-1] == 1)
            expect(self.scope.is_read_once(result))
            (last,) = readers_of(self.graph, result)
            expect(self._sums(last) == self.large)
            found.backward.append(last)
            result = result_of(last)
        elif op.reads[0] == rows:
            expect(op.target in (*MATRIX_PRODUCTS, aten.mv.default) and self._holds_columns(rows))
        else:
            expect(op.target in MATRIX_PRODUCTS and self._holds_rows(rows))
        expect(math.prod(self._shape(result)) == self.hidden and is_contiguous(self.values[result]))
        found.gradients["weight"] = result

    def _check_middle(self, found: AdditiveScores, after_tanh: Sequence[Op]) -> None:
        """Expect nothing else to read sums, or what a LayerNorm made of them."""
        dot, biased = self.dot, self.dot.captures.get("biased")
        inner = [dot["sum"], *([] if biased is None else [biased])]
        allowed = {found.tanh.id, *(self.values[value].producer for value in inner)}
        if found.norm is not None:
            inner += [value for value in found.norm.writes if value is not None]
            allowed |= {found.norm.id, *(op.id for op in after_tanh)}
        for value in inner:
            expect(value not in self.scope.leaving and allowed.issuperset(self.values[value].readers))

    def _through_norm(self, found: AdditiveScores, gradient: int) -> int:
        """The gradient of what the LayerNorm reads."""
        assert found.norm is not None
        expect(self.scope.is_read_once(gradient))
        (op,) = readers_of(self.graph, gradient)
        _, mean, rate = found.norm.writes
        captures = {"gradient": gradient, "total": found.norm.reads[0], "mean": mean, "rate": rate}
        inner = op.writes[0]
        expect(inner is not None and any(matches(self.scope, THROUGH_NORM, op, captures)))
        assert inner is not None
        for name, argument, value in zip(("norm_weight", "norm_bias"), op.args[5:7], op.writes[1:], strict=True):
            if (
                argument is not None
                and value is not None
                and (self.values[value].readers or value in self.scope.leaving)
            ):
                found.gradients[name] = value
        found.backward.append(op)
        return inner

    def _back_to_operands(self, found: AdditiveScores, gradient: int) -> None:
        """Sums over dimensions along which an operand was spread out; the gradient itself for one that was not."""
        wanted: dict[str, set[int]] = {}
        for operand in (self.dot["one"], self.dot["two"]):
            varies = self._varies(operand)
            name = "query" if self._unspread(operand) == found.query else "keys"
            wanted[name] = {place for place in self.large if not varies[place]}
        if found.bias is not None:
            wanted["bias"] = self.large
        expect(is_contiguous(self.values[gradient]))
        others = []
        for reader in readers_of(self.graph, gradient):
            names = [name for name, places in wanted.items() if places and self._sums(reader) == places]
            if len(names) == 1 and names[0] not in found.gradients:
                result = result_of(reader)
                expect(is_contiguous(self.values[result]))
                found.gradients[names[0]] = result
                found.backward.append(reader)
            else:
                others.append(reader)
        whole = [name for name, places in wanted.items() if not places]
        read_whole = bool(others) or gradient in self.scope.leaving
        expect(bool(whole) or not read_whole)
        if read_whole:
            found.gradients[whole[0]] = gradient

    def _shape(self, number: int) -> tuple[int, ...]:
        return self.values[number].shape

    def _sums(self, op: Op) -> set[int] | None:
        """Dimensions larger than 1 that an operator sums over, if that is all it does."""
        if op.target is not SUM or op.kwargs or op.args[1] is None:
            return None
        shape = self._shape(op.reads[0])
        return {place % len(shape) for place in op.args[1] if shape[place % len(shape)] > 1}
