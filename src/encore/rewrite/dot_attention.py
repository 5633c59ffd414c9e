"""Dot-product attention in a graph, however it was written: `softmax(scale * query @ keys + masks) @ values`.

Found from the product with the values. Whatever a model calls (`matmul`, `bmm`, `einsum`, `baddbmm`), the graph has a
stack of matrix products before the softmax and one after it. Between the first of them and the softmax, scores may be
multiplied and divided by numbers, have masks added, and be filled in by a mask (`KINDS`); between the softmax and the
second, weights may be dropped; views do not matter. In backward, all that reads scores, their softmax or gradients of
either must be part of the same formula. Where anything else reads them (a caller who wants the weights, the gradient of
a learnt bias), the attention is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.editor import view_strides
from encore.graph.values import is_contiguous
from encore.rewrite.matching import (
    AnyTensor,
    Argument,
    Captures,
    Match,
    OneOf,
    OpPattern,
    SameElements,
    Scope,
    Views,
    matches,
)
from encore.rewrite.queries import device_of, readers_of, replaced_storages, result_of, same_elements
from encore.rewrite.walking import NoMatchError, expect, views_and_readers
from encore.rnn.dot import TYPES

aten = torch.ops.aten

# -- patterns ----------------------------------------------------------------------------------------------------------


def _is_number(argument: Any) -> bool:
    return isinstance(argument, int | float) and not isinstance(argument, bool)


def _constant(number: Any) -> OneOf:
    """A tensor of no dimensions that is filled with a number."""
    no_dimensions = Argument("", lambda size: not list(size))
    return OneOf(
        OpPattern(aten.scalar_tensor.default, number, any_kwargs=True),
        OpPattern(aten.full.default, no_dimensions, number, any_kwargs=True),
    )


SOFTMAX = OpPattern(aten._softmax.default, AnyTensor("scores"), Argument("dim"), False, name="softmax", forward=True)
WEIGHTS = AnyTensor("weights", SOFTMAX)
NOISE = AnyTensor("noise", OpPattern(torch.ops.encore.dropout_noise.default, ..., name="draw"))
DROPPED = AnyTensor("dropped", OpPattern(aten.mul.Tensor, Views(WEIGHTS), NOISE, name="drop"))
MIX = OpPattern(aten.bmm.default, AnyTensor("stack", Views(OneOf(WEIGHTS, DROPPED))), AnyTensor("values"), forward=True)

TO_VALUES = OpPattern(aten.bmm.default, SameElements("stack", transposed=True), AnyTensor("grad"), forward=False)
TO_WEIGHTS = OpPattern(
    aten.bmm.default, AnyTensor("grad"), SameElements("values", transposed=True),
    name="to_weights", only_use=True, forward=False,
)  # fmt: skip
UNDROPPED = OpPattern(
    aten.mul.Tensor, AnyTensor("undropped", Views(TO_WEIGHTS, only_use=True)), AnyTensor("noise"),
    name="undrop", only_use=True, forward=False,
)  # fmt: skip
THROUGH_SOFTMAX = OpPattern(
    aten._softmax_backward_data.default, Views(OneOf(TO_WEIGHTS, UNDROPPED), only_use=True), AnyTensor("weights"),
    Argument("dim"), Argument("dtype"), forward=False,
)  # fmt: skip
TO_QUERY = OpPattern(aten.bmm.default, AnyTensor("gradient"), SameElements("right", transposed=True), forward=False)
TO_KEYS = OpPattern(aten.bmm.default, SameElements("left", transposed=True), AnyTensor("gradient"), forward=False)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Something that happens to scores, and what undoes it in backward."""

    name: str
    forward: OpPattern
    backward: tuple[OpPattern, ...] = ()
    shows: bool = False
    """Whether the mask is false where scores are filled in."""


SCORES, GRADIENT, MASK = AnyTensor("scores"), AnyTensor("gradient"), AnyTensor("mask")
NUMBER, ZERO = Argument("number", _is_number), _constant(0)
TIMES, OVER = (aten.mul.Tensor, aten.mul.Scalar), (aten.div.Tensor, aten.div.Scalar)
SAME_MASK = SameElements("mask")
UNFILL = (
    OpPattern(aten.masked_fill.Scalar, GRADIENT, SAME_MASK, 0),
    OpPattern(aten.where.self, SAME_MASK, ZERO, GRADIENT),
)
UNSHOW = (OpPattern(aten.where.self, SAME_MASK, GRADIENT, ZERO),)
ADD = _Kind("add", OpPattern(aten.add.Tensor, SCORES, MASK, commutes=True))
KINDS = (
    ADD,
    _Kind("times", OpPattern(TIMES, SCORES, NUMBER), (OpPattern(TIMES, GRADIENT, NUMBER),)),
    _Kind("over", OpPattern(OVER, SCORES, NUMBER), (OpPattern(OVER, GRADIENT, NUMBER),)),
    _Kind("fill", OpPattern(aten.masked_fill.Scalar, SCORES, MASK, NUMBER), UNFILL),
    _Kind("fill", OpPattern(aten.where.self, MASK, _constant(NUMBER), SCORES), UNFILL),
    _Kind("fill", OpPattern(aten.where.self, MASK, SCORES, _constant(NUMBER)), UNSHOW, shows=True),
)


@dataclass(frozen=True, slots=True)
class _Step:
    """One operator between the product and the softmax."""

    kind: _Kind
    captures: Captures
    shape: tuple[int, ...]
    """Of the scores, where it happens."""


# -- what is found -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DotAttention:
    """One place where queries attend to values."""

    softmax: Op
    mix: Op
    """The product with the values."""
    shape: tuple[int, int, int, int]
    """Of the scores: B, H, Tq, Tk."""
    sizes: tuple[int, int]
    """D and E."""
    query: int = -1
    keys: int = -1
    values: int = -1
    """Values that can be viewed as `[B, H, Tq, D]`, `[B, H, D, Tk]` and `[B, H, Tk, E]`."""
    scale: float = 1.0
    added: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)
    fills: list[float] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    """For each mask of what is hidden, whether it is false there."""
    draw: Op | None = None
    """What draws dropout's noise for the weights, if some are dropped."""
    grad: int | None = None
    """Gradient of the result; None where there is no backward."""
    backward: list[Op] = field(default_factory=list)
    """Operators of backward that are replaced."""
    gradients: dict[str, int] = field(default_factory=dict)
    """What backward returns, by the name of the operand."""

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


def find_dot_attentions(graph: Graph) -> Iterator[DotAttention]:
    """All of them, in order."""
    scope, replaced = Scope(graph), replaced_storages(graph)
    for op in graph.ops:
        for match in matches(scope, MIX, op):
            try:
                found = _DotSearch(match, replaced).found()
            except NoMatchError:
                continue
            yield found


class _DotSearch:
    """One product with the values, and what is known about the operators before it."""

    def __init__(self, mix: Match, replaced: set[int | None]) -> None:
        self.scope = mix.scope
        self.graph = mix.graph
        self.values = mix.graph.values
        self.replaced = replaced
        self.mix = mix
        self.weights = mix.value("weights")
        self.matrix = self.weights.shape[-2:]
        self.numbers = math.prod(self.weights.shape)

    def found(self) -> DotAttention:
        mix, weights = self.mix, self.weights
        expect(weights.dtype in TYPES and is_contiguous(weights) and device_of(self.graph, weights.id) == "cpu")
        expect(len(weights.shape) in (3, 4) and 0 not in weights.shape)
        expect(mix["dim"] in (-1, len(weights.shape) - 1))
        expect(self._is_stack(mix["stack"]) and mix.value("values").storage != mix.value("stack").storage)
        product, steps = self._steps(mix["scores"], mix["softmax"])
        left, right = (argument.value for argument in product.args[-2:])
        found = self._named(product, steps)
        self._choose_operands(found, (left, right, mix["values"]))
        captures = {**mix.captures, "left": left, "right": right, "dtype": weights.dtype}
        captures["alpha"] = product.kwargs.get("alpha", 1)
        for op in self._backward_readers(found):
            self._backward(found, op, steps, captures)
        return found

    # -- forward -------------------------------------------------------------------------------------------------------

    def _steps(self, number: int, reader: Op) -> tuple[Op, list[_Step]]:
        """The product that makes scores, and what happens to them before an operator reads them."""
        op = self.graph.producer(number)
        expect(self.scope.is_read_once(number) and op is not None and op.forward and not op.returns_tuple)
        assert op is not None
        if op.kind is OpClass.VIEW:
            expect(reader.kind is OpClass.VIEW or self._is_whole(number))
            return self._steps(op.reads[0], op)
        value = self.values[number]
        expect(self._is_whole(number) and value.dtype == self.weights.dtype)
        if op.target is aten.bmm.default and self._is_stack(number):
            return op, []
        if op.target is aten.baddbmm.default and self._is_stack(number):
            beta = op.kwargs.get("beta", 1)
            expect(set(op.kwargs) <= {"alpha", "beta"} and beta in (0, 1))
            return op, [_Step(ADD, {"mask": op.args[0].value}, value.shape)] if beta else []
        expect(value.shape[-2:] == self.matrix and len(value.shape) in (3, 4))
        for kind in KINDS:
            for match in matches(self.scope, kind.forward, op):
                if match.value("scores").shape == value.shape:
                    try:
                        product, steps = self._steps(match["scores"], op)
                    except NoMatchError:  # of an addition, the other operand may be the scores
                        continue
                    return product, [*steps, _Step(kind, match.captures, value.shape)]
        raise NoMatchError

    def _named(self, product: Op, steps: Sequence[_Step]) -> DotAttention:
        """Scale, masks and fills from the steps in order, where the operator can do the same."""
        left, right = self.values[product.args[-2].value], self.mix.value("values")
        found = DotAttention(self.mix["softmax"], self.mix.op, self._shape(steps), (left.shape[2], right.shape[2]))
        found.scale, found.draw = float(product.kwargs.get("alpha", 1)), self.mix.captures.get("draw")
        for step in steps:
            number = step.captures.get("number", 0.0)
            if step.kind.name in ("times", "over"):
                expect(not found.added and number > 0)
                factor = float(number) if step.kind.name == "times" else 1 / number
                found.scale *= factor
                found.fills = [fill * factor for fill in found.fills]
                continue
            self._check_mask(step, found.shape)
            if step.kind is ADD:
                expect(all(fill == -math.inf for fill in found.fills))
                found.added.append(step.captures["mask"])
            else:
                found.hidden.append(step.captures["mask"])
                found.shown.append(step.kind.shows)
                found.fills.append(float(number))
        expect(math.isfinite(found.scale) and found.scale > 0)
        return found

    def _shape(self, steps: Sequence[_Step]) -> tuple[int, int, int, int]:
        """Sequences, heads, queries and keys, from the places where a shape has them apart."""
        whole = {shape for shape in (self.weights.shape, *(step.shape for step in steps)) if len(shape) == 4}
        expect(len(whole) <= 1)
        queries, keys = self.matrix
        batch, heads, *_ = whole.pop() if whole else (1, self.numbers // (queries * keys))
        return batch, heads, queries, keys

    def _check_mask(self, step: _Step, shape: Sequence[int]) -> None:
        """Expect it to mean the same for scores `[B, H, Tq, Tk]`."""
        mask = self.values[step.captures["mask"]]
        wanted = self.weights.dtype if step.kind is ADD else torch.bool
        expect(mask.dtype == wanted and mask.storage not in self.replaced)
        expect(len(mask.shape) <= len(step.shape))
        if len(step.shape) == 3 and shape[0] > 1:
            expect(len(mask.shape) < 3 or mask.shape[0] == 1)

    def _choose_operands(self, found: DotAttention, given: tuple[int, int, int]) -> None:
        """Query, keys and values as they were before `matmul` copied heads into one row, if this saves no more."""
        shapes = tuple(found.shapes.values())
        before = [self._before_copy(number, shape) for number, shape in zip(given, shapes, strict=True)]
        storages = {self.values[number].storage for number in before}
        saved = sum(self.graph.storages[storage].bytes for storage in storages if storage is not None)
        chosen = before if saved <= sum(self.values[number].bytes for number in given) else list(given)
        for number, shape in zip(chosen, shapes, strict=True):
            value = self.values[number]
            expect(value.dtype == self.weights.dtype and value.storage not in self.replaced)
            expect(_reads_in_place(view_strides(value, shape), shape))
        found.query, found.keys, found.values = chosen

    def _before_copy(self, number: int, shape: Sequence[int]) -> int:
        source = number
        while (op := self.graph.producer(source)) is not None and op.kind is OpClass.VIEW and not op.returns_tuple:
            source = op.reads[0]
        if op is None or op.target is not aten.clone.default or not is_contiguous(self.values[number]):
            return number
        if op.kwargs.get("memory_format") is not torch.contiguous_format:
            return number
        return op.reads[0] if _reads_in_place(view_strides(self.values[op.reads[0]], shape), shape) else number

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward_readers(self, found: DotAttention) -> list[Op]:
        """The operators of backward that read weights, dropped or not. In forward only those of the pattern may."""
        _, readers = views_and_readers(self.graph, self.weights.id, self.scope.leaving)
        expected = [found.mix]
        if found.draw is not None:
            drop, noise, dropped = self.mix["drop"], self.mix["noise"], self.mix["dropped"]
            expect(all(op.forward or op.target is aten._softmax_backward_data.default for op in readers))
            expect(noise not in self.scope.leaving and self._is_whole(noise) and self._is_whole(dropped))
            others = [reader for reader in self.values[noise].readers if reader != drop.id]
            expect(len(others) <= 1 and not any(self.graph.ops[reader].forward for reader in others))
            readers += views_and_readers(self.graph, dropped, self.scope.leaving)[1]
            expected += [found.draw, drop]
        expect(all(op in expected for op in readers if op.forward))
        backward = [op for op in readers if not op.forward]
        expect(sum(op.target is aten._softmax_backward_data.default for op in backward) <= 1 and len(backward) <= 2)
        return sorted(backward, key=lambda op: op.target is aten._softmax_backward_data.default)

    def _backward(self, found: DotAttention, op: Op, steps: Sequence[_Step], captures: Captures) -> None:
        """Fill in gradients, or find that something else reads scores or weights."""
        if op.target is not aten._softmax_backward_data.default:
            match = self._match((TO_VALUES,), op, captures)
            found.grad = match["grad"]
            found.gradients["values"] = self._result(op)
            found.backward.append(op)
            return
        match = self._match((THROUGH_SOFTMAX,), op, captures)
        undrop, undropped = match.captures.get("undrop"), match.captures.get("undropped")
        expect((undrop is None) == (found.draw is None))
        whole = [op.args[0].value, *([] if undropped is None else [undropped])]
        expect(all(self._is_whole(number) for number in whole) and self._is_stack(result_of(match["to_weights"])))
        if found.grad is None:
            found.grad = match["grad"]
        expect(same_elements(self.values[found.grad], match.value("grad")))
        found.backward += [match["to_weights"], *([] if undrop is None else [undrop]), op]
        self._to_query_and_keys(found, self._undone(found, op, steps), captures)

    def _undone(self, found: DotAttention, op: Op, steps: Sequence[_Step]) -> int:
        """The gradient of the product, from that of the softmax's operand: steps are undone from the last to the
        first."""
        number = self._result(op)
        for step in reversed(steps):
            if step.kind is ADD:
                continue
            views, readers = views_and_readers(self.graph, number, self.scope.leaving)
            expect(len(readers) == 1 and not readers[0].forward)
            match = self._match(step.kind.backward, readers[0], step.captures)
            number = self._result(match.op)
            expect(match["gradient"] in views and self._is_whole(match["gradient"]))
            expect(step.kind.name != "fill" or self.values[number].shape == step.shape)
            found.backward.append(match.op)
        return number

    def _to_query_and_keys(self, found: DotAttention, number: int, captures: Captures) -> None:
        views, readers = views_and_readers(self.graph, number, self.scope.leaving)
        for op in readers:
            name = "query" if op.args[0].value in views else "keys"
            match = self._match((TO_QUERY if name == "query" else TO_KEYS,), op, captures)
            expect(match["gradient"] in views and self._is_stack(match["gradient"]) and name not in found.gradients)
            found.backward.append(op)
            if captures["alpha"] != 1:
                expect(self.scope.is_read_once(self._result(op)))
                (op,) = readers_of(self.graph, self._result(op))
                self._match((OpPattern(TIMES, AnyTensor(), captures["alpha"]),), op, {})
                found.backward.append(op)
            found.gradients[name] = self._result(op)

    # -- conditions ----------------------------------------------------------------------------------------------------

    def _match(self, patterns: Sequence[OpPattern], op: Op, captures: Captures) -> Match:
        """How one of the patterns fits an operator."""
        found = (match for pattern in patterns for match in matches(self.scope, pattern, op, captures))
        match = next(found, None)
        if match is None:
            raise NoMatchError
        return match

    def _result(self, op: Op) -> int:
        """What an operator makes: one contiguous tensor."""
        expect(len(op.writes) == 1 and op.writes[0] is not None and is_contiguous(self.values[op.writes[0]]))
        return result_of(op)

    def _is_whole(self, number: int) -> bool:
        """Return whether it is all scores (or what became of them), one after the other."""
        return math.prod(self.values[number].shape) == self.numbers and is_contiguous(self.values[number])

    def _is_stack(self, number: int) -> bool:
        """The same, as one stack of matrices."""
        shape = self.values[number].shape
        return len(shape) == 3 and shape[1:] == self.matrix and self._is_whole(number)


def _reads_in_place(stride: Sequence[int] | None, shape: Sequence[int]) -> bool:
    """Return whether a product can read matrices with these strides, if there are any, where they are."""
    if stride is None:
        return False
    (rows, columns), (row, column) = shape[-2:], stride[-2:]
    return (column == 1 and (rows == 1 or row >= columns)) or (row == 1 and (columns == 1 or column >= rows))
