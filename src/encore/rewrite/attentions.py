"""Dot-product attention in a graph, however it was written: `softmax(scale * query @ keys + masks) @ values`.

Found from the softmax. Whatever a model calls (`matmul`, `bmm`, `einsum`, `baddbmm`), the graph has a stack of matrix
products before it and one after it. Between the first of them and the softmax, scores may be multiplied and divided by
numbers, have masks added, and be filled in where a mask says so; between the softmax and the second, weights may be
dropped; views do not matter. In backward, all that reads scores, their softmax or gradients of either must be part of
the same formula. Any other reader (a caller who wants the weights, the gradient of a learnt bias), and it is left
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.values import Ref, Value, is_contiguous
from encore.rewrite.edit import view_strides
from encore.rewrite.matching import NoMatchError, expect, views_and_readers
from encore.rewrite.queries import device_of, exported, replaced_storages
from encore.rnn.dot import TYPES

aten = torch.ops.aten
TIMES = (aten.mul.Tensor, aten.mul.Scalar)
OVER = (aten.div.Tensor, aten.div.Scalar)


@dataclass(slots=True)
class Attention:
    """One place where queries attend to values."""

    softmax: Op
    query: int
    keys: int
    values: int
    """Values that can be viewed as `[B, H, Tq, D]`, `[B, H, D, Tk]` and `[B, H, Tk, E]`."""
    shape: tuple[int, int, int, int]
    """Of the scores: B, H, Tq, Tk."""
    sizes: tuple[int, int]
    """D and E."""
    mix: Op
    """The product with the values."""
    scale: float = 1.0
    added: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)
    fills: list[float] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    """For each mask of what is hidden: is it false there?"""
    draw: Op | None = None
    """What draws dropout's noise for the weights, if some are dropped."""
    grad: int | None = None
    """Gradient of the result; None where there is no backward."""
    backward: list[Op] = field(default_factory=list)
    """Operators of backward that go."""
    gradients: dict[str, int] = field(default_factory=dict)
    """What leaves in backward, by the name of the operand."""

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Of query, keys and values."""
        batch, heads, queries, keys = self.shape
        inner, outer = self.sizes
        return {
            "query": (batch, heads, queries, inner),
            "keys": (batch, heads, inner, keys),
            "values": (batch, heads, keys, outer),
        }


def find_attentions(graph: Graph) -> Iterator[Attention]:
    """All of them, in order."""
    leaving = exported(graph)
    changed = replaced_storages(graph)
    for op in graph.ops:
        if op.target is aten._softmax.default and op.forward:
            found = _Match(graph, leaving, changed, op).attention()
            if found is not None:
                yield found


@dataclass(frozen=True, slots=True)
class _Dropout:
    """Weights on their way to the values, some of them dropped."""

    draw: Op
    noise: int
    multiply: Op
    dropped: int


@dataclass(frozen=True, slots=True)
class _Step:
    """What happens to scores on their way: multiplied ("times"), divided ("over"), added to ("add"), filled in."""

    kind: str
    number: float = 0.0
    mask: int = -1
    shape: tuple[int, ...] = ()
    """Of the scores, where it happens."""
    shows: bool = False
    """Is the mask false where scores are filled in?"""


class _Match:
    """One softmax, and what is known about its surroundings so far."""

    def __init__(self, graph: Graph, leaving: set[int], changed: set[int | None], softmax: Op) -> None:
        self.graph = graph
        self.values = graph.values
        self.leaving = leaving
        self.changed = changed
        self.softmax = softmax
        (weights,) = softmax.writes
        assert weights is not None
        self.weights: int = weights
        self.dropout: _Dropout | None = None

    def attention(self) -> Attention | None:
        try:
            return self._attention()
        except NoMatchError:
            return None

    def _attention(self) -> Attention:
        value = self.values[self.weights]
        expect(value.dtype in TYPES and is_contiguous(value) and device_of(self.graph, self.weights) == "cpu")
        expect(len(value.shape) in (3, 4) and 0 not in value.shape)
        expect(self.softmax.args[1] in (-1, len(value.shape) - 1) and self.softmax.args[2] is False)
        self.matrix = value.shape[-2:]
        self.numbers = math.prod(value.shape)
        product, steps, alpha = self._before()
        views, readers = views_and_readers(self.graph, self.weights, self.leaving)
        forward = [reader for reader in readers if reader.forward]
        self.dropout = self._dropout(views, forward)
        if self.dropout is not None:
            expect(all(one.forward or one.target is aten._softmax_backward_data.default for one in readers))
            views, more = views_and_readers(self.graph, self.dropout.dropped, self.leaving)
            forward = [reader for reader in more if reader.forward]
            readers = [one for one in (*readers, *more) if not one.forward]
        expect(len(forward) == 1 and forward[0].target is aten.bmm.default)
        mix = forward[0]
        expect(mix.args[0].value in views and self._is_stack(mix.args[0].value) and mix.args[1].value not in views)
        left, right = product.args[-2].value, product.args[-1].value
        found = self._named(product, steps, alpha, mix)
        self._choose_operands(found, (left, right, mix.args[1].value))
        self._backward(found, steps, alpha, (left, right), [one for one in readers if not one.forward], views)
        return found

    # -- forward -----------------------------------------------------------------------------------------------------

    def _before(self) -> tuple[Op, list[_Step], float]:
        """The product that makes scores, what happens to them up to the softmax, and a number it multiplies by."""
        steps: list[_Step] = []
        number, reader = self.softmax.reads[0], self.softmax
        while True:
            expect(self.values[number].readers == [reader.id] and number not in self.leaving)
            expect(reader.kind is OpClass.VIEW or self._is_whole(number))
            op = self._maker(number)
            expect(op.forward)
            if op.target in (aten.bmm.default, aten.baddbmm.default):
                break
            if op.kind is not OpClass.VIEW:
                step, onward = self._step(op)
                steps.append(step)
            else:
                onward = op.reads[0]
            number, reader = onward, op
        expect(self._is_stack(number))
        alpha = float(op.kwargs.get("alpha", 1))
        if op.target is aten.baddbmm.default:
            expect(set(op.kwargs) <= {"alpha", "beta"} and op.kwargs.get("beta", 1) in (0, 1))
            if op.kwargs.get("beta", 1) == 1:
                steps.append(_Step("add", mask=op.args[0].value, shape=self.values[number].shape))
        return op, steps[::-1], alpha

    def _step(self, op: Op) -> tuple[_Step, int]:
        """One operator between the product and the softmax, and the scores that it reads."""
        (result,) = op.writes
        assert result is not None
        shape = self.values[result].shape
        expect(shape[-2:] == self.matrix and len(shape) in (3, 4) and not op.kwargs)
        first = op.args[0]
        if op.target is aten.add.Tensor and len(op.reads) == len(op.args) == 2:
            for scores, mask in (op.reads, op.reads[::-1]):
                if self.values[scores].shape == shape and self._comes_from_product(scores):
                    return _Step("add", mask=mask, shape=shape), scores
        if op.target is aten.where.self:
            return self._where(op, shape)
        expect(isinstance(first, Ref) and self.values[first.value].shape == shape)
        if op.target in (*TIMES, *OVER) and _is_number(op.args[1]):
            return _Step("times" if op.target in TIMES else "over", float(op.args[1])), first.value
        if op.target is aten.masked_fill.Scalar and _is_number(op.args[2]):
            return _Step("fill", float(op.args[2]), op.args[1].value, shape), first.value
        raise NoMatchError

    def _where(self, op: Op, shape: tuple[int, ...]) -> tuple[_Step, int]:
        """A fill that was written as a choice between scores and one number."""
        mask, chosen, other = (argument.value for argument in op.args)
        for scores, filled, shows in ((other, chosen, False), (chosen, other, True)):
            number = self._number(filled)
            if number is not None:
                expect(self.values[scores].shape == shape and self._result_has_type(op))
                return _Step("fill", number, mask, shape, shows), scores
        raise NoMatchError

    def _number(self, value: int) -> float | None:
        """The number that a tensor of no dimensions holds, where the graph tells."""
        op = self.graph.producer(value)
        if op is None or self.values[value].shape != ():
            return None
        place = {aten.scalar_tensor.default: 0, aten.full.default: 1}.get(op.target)
        return float(op.args[place]) if place is not None and _is_number(op.args[place]) else None

    def _result_has_type(self, op: Op) -> bool:
        return self.values[self._result(op)].dtype == self.values[self.weights].dtype

    def _dropout(self, views: Sequence[int], readers: Sequence[Op]) -> _Dropout | None:
        """Does forward read the weights to drop some of them?"""
        draws = [op for op in readers if op.target is torch.ops.encore.dropout_noise.default]
        if not draws:
            return None
        expect(len(draws) == 1 and len(readers) == 2)
        (draw,) = draws
        (multiply,) = (op for op in readers if op is not draw)
        noise = self._result(draw)
        expect(
            multiply.target is aten.mul.Tensor and multiply.args[0].value in views and multiply.args[1] == Ref(noise)
        )
        expect(noise not in self.leaving and self._is_whole(noise))
        backward = [one for one in self.values[noise].readers if one != multiply.id]
        expect(len(backward) <= 1 and not any(self.graph.ops[one].forward for one in backward))
        dropped = self._result(multiply)
        expect(self._is_whole(dropped))
        return _Dropout(draw, noise, multiply, dropped)

    def _comes_from_product(self, number: int) -> bool:
        """Is it made by a stack of products, as far as operators with one large operand lead back?"""
        while (op := self.graph.producer(number)) is not None:
            if op.target in (aten.bmm.default, aten.baddbmm.default):
                return True
            if not op.reads or (op.kind is not OpClass.VIEW and op.target not in (*TIMES, *OVER, *MASKING)):
                return False
            number = op.reads[0]
        return False

    def _named(self, product: Op, steps: Sequence[_Step], alpha: float, mix: Op) -> Attention:
        """Scale, masks and fills from the steps in order, where the operator can do the same."""
        left, right = self.values[product.args[-2].value], self.values[mix.args[1].value]
        found = Attention(self.softmax, -1, -1, -1, self._whole(steps), (left.shape[2], right.shape[2]), mix, alpha)
        found.draw = None if self.dropout is None else self.dropout.draw
        for step in steps:
            if step.kind in ("times", "over"):
                expect(not found.added and step.number > 0)
                factor = step.number if step.kind == "times" else 1 / step.number
                found.scale *= factor
                found.fills = [fill * factor for fill in found.fills]
                continue
            self._check_mask(step, found.shape)
            if step.kind == "add":
                expect(all(fill == -math.inf for fill in found.fills))
                found.added.append(step.mask)
            else:
                found.hidden.append(step.mask)
                found.shown.append(step.shows)
                found.fills.append(step.number)
        expect(math.isfinite(found.scale) and found.scale > 0)
        return found

    def _whole(self, steps: Sequence[_Step]) -> tuple[int, int, int, int]:
        """Sequences, heads, queries and keys, from the places where a shape tells them apart."""
        shapes = [self.values[self.weights].shape, *(step.shape for step in steps)]
        whole = {shape for shape in shapes if len(shape) == 4}
        expect(len(whole) <= 1)
        queries, keys = self.matrix
        if not whole:
            return 1, self.numbers // (queries * keys), queries, keys
        batch, heads, *_ = whole.pop()
        return batch, heads, queries, keys

    def _check_mask(self, step: _Step, shape: Sequence[int]) -> None:
        """Does it mean the same to scores `[B, H, Tq, Tk]`?"""
        mask = self.values[step.mask]
        wanted = self.values[self.weights].dtype if step.kind == "add" else torch.bool
        expect(mask.dtype == wanted and mask.storage not in self.changed)
        expect(len(mask.shape) <= len(step.shape))
        if len(step.shape) == 3 and shape[0] > 1:
            expect(len(mask.shape) < 3 or mask.shape[0] == 1)

    # -- what the operator will read ---------------------------------------------------------------------------------

    def _choose_operands(self, found: Attention, given: tuple[int, int, int]) -> None:
        """Query, keys and values as they were before `matmul` copied heads into one row, if no more is held so."""
        shapes = tuple(found.shapes.values())
        before = [self._before_copy(number, shape) for number, shape in zip(given, shapes, strict=True)]
        storages = {self.values[number].storage for number in before}
        held = sum(self.graph.storages[storage].bytes for storage in storages if storage is not None)
        chosen = before if held <= sum(self.values[number].bytes for number in given) else list(given)
        for number, shape in zip(chosen, shapes, strict=True):
            value = self.values[number]
            expect(value.dtype == self.values[self.weights].dtype and value.storage not in self.changed)
            strides = view_strides(value, shape)
            expect(strides is not None and _reads_in_place(strides, shape))
        found.query, found.keys, found.values = chosen

    def _before_copy(self, number: int, shape: Sequence[int]) -> int:
        source = number
        while (op := self.graph.producer(source)) is not None and op.kind is OpClass.VIEW and not op.returns_tuple:
            source = op.reads[0]
        if op is None or op.target is not aten.clone.default:
            return number
        if op.kwargs.get("memory_format") is not torch.contiguous_format or not is_contiguous(self.values[number]):
            return number
        strides = view_strides(self.values[op.reads[0]], shape)
        return op.reads[0] if strides is not None and _reads_in_place(strides, shape) else number

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(
        self, found: Attention, steps: Sequence[_Step], alpha: float, factors: tuple[int, int],
        readers: Sequence[Op], views: Sequence[int],
    ) -> None:  # fmt: skip
        """Fill in gradients, or find that somebody else looks at scores or weights."""
        through = [op for op in readers if op.target is aten._softmax_backward_data.default]
        to_values = [op for op in readers if op not in through]
        expect(len(through) <= 1 and len(to_values) <= 1)
        for op in to_values:
            expect(op.target is aten.bmm.default and op.args[0].value in views and op.args[1].value not in views)
            expect(self._turned(op.args[0].value, self._stack_of(views)))
            found.grad = op.args[1].value
            found.gradients["values"] = self._result(op)
            found.backward.append(op)
        for op in through:
            self._through_softmax(found, op)
            self._to_query_and_keys(found, self._undone(found, op, steps), alpha, factors)

    def _stack_of(self, views: Sequence[int]) -> int:
        return next(number for number in views if self._is_stack(number))

    def _through_softmax(self, found: Attention, op: Op) -> None:
        grad, weights, along, dtype = op.args
        expect(weights == Ref(self.weights) and along == self.softmax.args[1])
        expect(dtype == self.values[self.weights].dtype and grad != weights)
        number, reader = grad.value, op
        expect(self._is_whole(number))
        undropped = self.dropout is None
        while (maker := self._maker(number)).kind is OpClass.VIEW or not undropped:
            expect(self._read_only_by(number, reader))
            if maker.kind is not OpClass.VIEW:
                self._undrop(found, maker)
                undropped = True
            number, reader = maker.reads[0], maker
        expect(self._read_only_by(number, reader) and maker.target is aten.bmm.default and not maker.forward)
        expect(self._is_stack(number))
        result_grad, values = (argument.value for argument in maker.args)
        expect(self._turned(values, found.mix.args[1].value))
        if found.grad is None:
            found.grad = result_grad
        expect(_same(self.values[found.grad], self.values[result_grad]))
        found.backward += [maker, op]

    def _undrop(self, found: Attention, op: Op) -> None:
        """The gradient of dropped weights becomes that of all."""
        assert self.dropout is not None
        expect(op.target is aten.mul.Tensor and op.args[1] == Ref(self.dropout.noise) and not op.forward)
        expect(self._is_whole(op.args[0].value) and op.reads[0] == op.args[0].value)
        found.backward.append(op)

    def _undone(self, found: Attention, op: Op, steps: Sequence[_Step]) -> int:
        """The gradient of the product, from that of the softmax's operand: steps are undone from the last to the
        first."""
        wanted = [step for step in reversed(steps) if step.kind != "add"]
        number = self._result(op)
        for step in wanted:
            views, readers = views_and_readers(self.graph, number, self.leaving)
            expect(len(readers) == 1 and not readers[0].kwargs and not readers[0].forward)
            (reader,) = readers
            if step.kind == "fill" and reader.target is aten.where.self:
                self._unchosen(step, reader, views)
                found.backward.append(reader)
                number = self._result(reader)
                continue
            first = reader.args[0]
            expect(isinstance(first, Ref) and first.value in views and self._is_whole(first.value))
            if step.kind == "fill":
                expect(not step.shows)
                mask = reader.args[1] if reader.target is aten.masked_fill.Scalar else None
                expect(isinstance(mask, Ref) and _same(self.values[mask.value], self.values[step.mask]))
                expect(reader.args[2] == 0 and self.values[self._result(reader)].shape == step.shape)
            else:
                expect(reader.target in (TIMES if step.kind == "times" else OVER))
                expect(_is_number(reader.args[1]) and float(reader.args[1]) == step.number)
            found.backward.append(reader)
            number = self._result(reader)
        return number

    def _unchosen(self, step: _Step, op: Op, views: Sequence[int]) -> None:
        """A choice between the gradient and zero, as that between scores and a number was."""
        mask, chosen, other = (argument.value for argument in op.args)
        grad, zero = (chosen, other) if step.shows else (other, chosen)
        expect(_same(self.values[mask], self.values[step.mask]) and self._number(zero) == 0)
        expect(grad in views and self._is_whole(grad) and self.values[self._result(op)].shape == step.shape)

    def _to_query_and_keys(self, found: Attention, number: int, alpha: float, factors: tuple[int, int]) -> None:
        views, readers = views_and_readers(self.graph, number, self.leaving)
        left, right = factors
        for op in readers:
            expect(op.target is aten.bmm.default and not op.forward)
            first, second = (argument.value for argument in op.args)
            if first in views:
                expect(self._is_stack(first) and second not in views and self._turned(second, right))
                name = "query"
            else:
                expect(second in views and self._is_stack(second) and self._turned(first, left))
                name = "keys"
            expect(name not in found.gradients)
            found.backward.append(op)
            result = self._result(op)
            if alpha != 1:
                (last,) = (self.graph.ops[one] for one in self._readers(result, count=1))
                expect(last.target in TIMES and _is_number(last.args[1]) and float(last.args[1]) == alpha)
                found.backward.append(last)
                result = self._result(last)
            found.gradients[name] = result

    # -- small questions ---------------------------------------------------------------------------------------------

    def _maker(self, number: int) -> Op:
        op = self.graph.producer(number)
        if op is None or op.returns_tuple:
            raise NoMatchError
        return op

    def _result(self, op: Op) -> int:
        """What an operator makes: one contiguous tensor."""
        expect(len(op.writes) == 1 and op.writes[0] is not None)
        (result,) = op.writes
        assert result is not None
        expect(is_contiguous(self.values[result]))
        return result

    def _readers(self, number: int, *, count: int) -> list[int]:
        expect(number not in self.leaving and len(self.values[number].readers) == count)
        return self.values[number].readers

    def _read_only_by(self, number: int, reader: Op) -> bool:
        return self.values[number].readers == [reader.id] and number not in self.leaving

    def _is_whole(self, number: int) -> bool:
        """Is it all scores (or what became of them), one after the other?"""
        return math.prod(self.values[number].shape) == self.numbers and is_contiguous(self.values[number])

    def _is_stack(self, number: int) -> bool:
        """The same, and as one stack of matrices?"""
        shape = self.values[number].shape
        return len(shape) == 3 and shape[1:] == self.matrix and self._is_whole(number)

    def _turned(self, number: int, other: int) -> bool:
        """Is a stack of matrices the other one, every matrix transposed?"""
        one, two = self.values[number], self.values[other]
        if len(one.shape) != 3 or len(two.shape) != 3 or (one.storage, one.offset) != (two.storage, two.offset):
            return False
        places = (0, 2, 1)
        sizes = tuple(two.shape[place] for place in places)
        strides = tuple(two.stride[place] for place in places)
        return one.shape == sizes and _strides(one.shape, one.stride) == _strides(sizes, strides)


MASKING = (aten.add.Tensor, aten.masked_fill.Scalar)
"""What may have scores as its first operand, on the way back to the product that made them."""


def _is_number(argument: Any) -> bool:
    return isinstance(argument, int | float) and not isinstance(argument, bool)


def _same(one: Value, two: Value) -> bool:
    """Do two values look at the same numbers in the same order?"""
    where = (one.storage, one.offset, one.shape) == (two.storage, two.offset, two.shape)
    return where and _strides(one.shape, one.stride) == _strides(two.shape, two.stride)


def _strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Strides that matter: of dimensions with more than one place."""
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]


def _reads_in_place(stride: Sequence[int], shape: Sequence[int]) -> bool:
    """Can a product read these matrices where they are?"""
    (rows, columns), (row, column) = shape[-2:], stride[-2:]
    return (column == 1 and (rows == 1 or row >= columns)) or (row == 1 and (columns == 1 or column >= rows))
