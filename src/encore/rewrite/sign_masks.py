"""A map that backward asks only for signs is kept as booleans: one byte an element instead of four; lossless.

That is Gist's Binarize, found in the graph: where every reader in backward needs no more than to know on which side of
a constant an element lies (ReLU and its kin) or compares it (`clamp`, `maximum`, `abs`), forward answers that question
right after it has made the map, in the same kernel where there are kernels, and backward reads the answer. A bit an
element is what the planner makes of booleans where it pays. A map that somebody else needs whole is left alone: beside
it, a mask would only add to what is kept.

The answers treat NaN as PyTorch's formulas do: ReLU's lets gradients through, LeakyReLU's takes it for negative. That
of `hardtanh` does one thing in its vector loop and another at the end of it, which no mask can say. Where the very bits
are asked for (`exact`), two are kept, one of NaN, and PyTorch's formula itself reads numbers that lie where the map's
did: inside, outside, or nowhere.

Narrow types are compared with a constant in their own type here, and in float32 by the formulas: constants that a type
cannot hold are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from encore.graph import Graph, Op
from encore.graph.editor import Editor
from encore.graph.needs import COMPARISONS, BackwardNeeds, Need, Reading
from encore.graph.values import Ref, Value
from encore.rewrite.matching import holds
from encore.rewrite.matmuls import device_of
from encore.rewrite.trial import Trial

aten = torch.ops.aten
SIXTH = float(torch.tensor(1.0 / 6.0, dtype=torch.float32))
"""What PyTorch's formula of `hardsigmoid` multiplies by, in float64 too."""


def sign_masks(graph: Graph, *, exact: bool) -> Graph:
    """The graph with such maps kept as booleans."""
    return _Masking(graph, exact).run()


class _Masking:
    def __init__(self, graph: Graph, exact: bool) -> None:
        self.graph = graph
        self.editor = Editor(graph)
        self.trial = Trial(self.editor)
        self.needs = BackwardNeeds(graph)
        self.early = _early_comparisons(graph)
        self.exact = exact
        self.masks: dict[tuple[int, Any], int] = {}
        self.moved: set[int] = set()

    def run(self) -> Graph:
        for storage, readings in self.needs.of.items():
            if not self.needs.is_kept_whole(storage) and self._pays(storage, readings):
                for reading in readings:
                    if reading.op.id in self.early:
                        self._compare_in_forward(reading.op)
                    elif reading.need is Need.SIGN:
                        self.formula(reading.op)(self, reading.op)
        return self.editor.finish()

    def _pays(self, storage: int, readings: list[Reading]) -> bool:
        """Can every reader be served, from fewer bytes?"""
        signs = [reading for reading in readings if reading.need is Need.SIGN]
        first = self.graph.values[self.graph.storages[storage].values[0]]
        if not signs or first.dtype is None or not first.dtype.is_floating_point:
            return False
        answers: dict[Any, int] = {}
        """Bytes of the booleans, by question."""
        for reading in signs:
            op = reading.op
            if op.id not in self.early and not self._can_answer(op):
                return False
            if self.graph.producer(reading.value) is None:
                return False
            if op.id in self.early:
                answers[op.id] = self.graph.values[op.writes[0] or 0].bytes
            else:
                answers[_question(op)] = (1 + self._is_uneven(op)) * len_of(self.graph, reading.value)
        return sum(answers.values()) < self.graph.storages[storage].bytes

    def _can_answer(self, op: Op) -> bool:
        """Does a comparison with its constants give what the formula would find?"""
        if op.target not in FORMULAS or op.kwargs:
            return False
        map_ = self.graph.values[op.args[1].value]
        if not all(holds(map_, bound) for _, bound in _question(op)):
            return False
        side, bound = _question(op)[0]
        if not self._is_uneven(op):
            mask = self.trial.made(side, (Ref(map_.id), bound))
            chosen = self.trial.made(aten.where.self, (mask, op.args[0], op.args[0]))
            return self.trial.copying_into(chosen, self.graph.values[op.writes[0] or 0].stride) is not None
        gradient = self.graph.values[op.args[0].value]
        # What is laid out in two ways makes a result that lies as PyTorch likes it, and sums of it follow its order.
        laid_out = self.trial.strides(side, (Ref(map_.id), bound)) == map_.stride == gradient.stride
        return laid_out and gradient.dtype is map_.dtype and _inside(map_, *op.args[2:]) is not None

    def _is_uneven(self, op: Op) -> bool:
        return self.exact and op.target in UNEVEN_ABOUT_NAN

    def formula(self, op: Op) -> Callable[[_Masking, Op], None]:
        return _by_numbers_alike if self._is_uneven(op) else FORMULAS[op.target]

    # -- comparisons -------------------------------------------------------------------------------------------------

    def _compare_in_forward(self, op: Op) -> None:
        """Have forward make a comparison that backward made until now, and what follows from it and the like."""
        pending = [op]
        while pending:
            moving = pending.pop()
            if moving.id in self.moved:
                continue
            sources = [self.graph.producer(value) for value in moving.reads]
            makers = [source for source in sources if source is not None]
            if any(not maker.forward and maker.id not in self.moved for maker in makers):
                later = [maker for maker in makers if not maker.forward and maker.id not in self.moved]
                pending += [moving, *later]
                continue
            self._move(moving, makers)
            (made,) = moving.writes
            assert made is not None
            followers = (self.graph.ops[reader] for reader in self.graph.values[made].readers)
            pending += [reader for reader in followers if reader.id in self.early]

    def _move(self, op: Op, makers: list[Op]) -> None:
        moved = self.editor.graph.ops[op.id]
        moved.forward = True
        self.moved.add(op.id)
        self.editor.place_after(moved, [self.editor.graph.ops[maker.id] for maker in makers])

    # -- formulas ----------------------------------------------------------------------------------------------------

    def ask(self, value: int, question: tuple[Any, ...], *, join: Any = None) -> Ref:
        """The answer to one question about a value (or to two, joined), made in forward."""
        key = (value, question)
        if key not in self.masks:
            maker, name = self.graph.producer(value), self.graph.values[value].name
            assert maker is not None
            answers = [
                self.trial.after(maker, f"{name}_side_{len(self.masks)}_{number}", target, (Ref(value), bound))
                for number, (target, bound) in enumerate(question)
            ]
            if join is not None:
                refs = tuple(map(Ref, answers))
                answers = [self.trial.after(maker, f"{name}_side_{len(self.masks)}", join, refs)]
            (self.masks[key],) = answers
        return Ref(self.masks[key])

    def zero(self, op: Op) -> Ref:
        return self.number(op, "zero", 0)

    def number(self, op: Op, what: str, number: float) -> Ref:
        """A constant, of the gradient's type."""
        gradient = self.graph.values[op.args[0].value]
        device = torch.device(device_of(self.graph, gradient.id))
        like = {"dtype": gradient.dtype, "device": device}
        return Ref(self.trial.before(op, f"{op.name}_{what}", aten.full.default, ([], number), **like))

    def answer(self, op: Op, mask: Ref, where: Ref, elsewhere: Ref) -> None:
        """Have the formula's result chosen by a mask."""
        (result,) = op.writes
        assert result is not None
        args = (mask, where, elsewhere)
        lying, wanted = self.trial.made(aten.where.self, args), self.graph.values[result].stride
        if tuple(lying.stride()) == wanted:
            self.editor.adopt(self.editor.op_before(op, f"{op.name}_where", aten.where.self, args), result)
            return
        made = self.trial.before(op, f"{op.name}_where", aten.where.self, args)
        format_ = {"memory_format": self.trial.copying_into(lying, wanted)}
        laid_out = self.editor.op_before(op, f"{op.name}_laid_out", aten.clone.default, (Ref(made),), format_)
        self.editor.adopt(laid_out, result)


def len_of(graph: Graph, value: int) -> int:
    """Elements of a value."""
    known = graph.values[value]
    return known.bytes // (1 if known.dtype is None else known.dtype.itemsize)


def _inside(map_: Value, low: float, high: float) -> float | None:
    """A number between two others, in the type of a map."""
    assert map_.dtype is not None
    ends = torch.tensor([low, high], dtype=map_.dtype)
    numbers = torch.tensor([(low + high) / 2, 0.0, low + 1, high - 1], dtype=map_.dtype)
    between = numbers[(numbers > ends[0]) & (numbers < ends[1])]
    return float(between[0]) if len(between) else None


def _early_comparisons(graph: Graph) -> set[int]:
    """Comparisons of backward that could be made in forward: they wait for no gradient."""
    waits = set(graph.tangents)
    early = set()
    for op in graph.ops:
        if waits.intersection(op.reads):
            waits.update(value for value in op.writes if value is not None)
        elif not op.forward and op.target in COMPARISONS and len(op.writes) == 1 and op.writes[0] is not None:
            made = graph.values[op.writes[0]]
            sources = [graph.producer(value) for value in op.reads]
            known = all(source is None or source.forward or source.id in early for source in sources)
            if made.dtype is torch.bool and known and any(sources):
                early.add(op.id)
    return early


# -- what each formula asks, and what it makes of the answer -----------------------------------------------------------


def _question(op: Op) -> Any:
    return QUESTIONS[op.target](op)


QUESTIONS: Mapping[Any, Callable[[Op], tuple[Any, ...]]] = {
    aten.threshold_backward.default: lambda op: ((aten.le.Scalar, op.args[2]),),
    aten.leaky_relu_backward.default: lambda op: ((aten.gt.Scalar, 0),),
    aten.hardtanh_backward.default: lambda op: ((aten.le.Scalar, op.args[2]), (aten.ge.Scalar, op.args[3])),
    aten.hardsigmoid_backward.default: lambda op: ((aten.gt.Scalar, -3), (aten.lt.Scalar, 3)),
}


def _closed_below(masking: _Masking, op: Op) -> None:
    mask = masking.ask(op.args[1].value, _question(op))
    masking.answer(op, mask, masking.zero(op), op.args[0])


def _closed_outside(masking: _Masking, op: Op) -> None:
    mask = masking.ask(op.args[1].value, _question(op), join=aten.logical_or.default)
    masking.answer(op, mask, masking.zero(op), op.args[0])


def _less_below(masking: _Masking, op: Op) -> None:
    mask = masking.ask(op.args[1].value, _question(op))
    slope = op.args[2]
    less = masking.trial.before(op, f"{op.name}_less", aten.mul.Tensor, (op.args[0], slope))
    masking.answer(op, mask, op.args[0], Ref(less))


def _less_inside(masking: _Masking, op: Op) -> None:
    mask = masking.ask(op.args[1].value, _question(op), join=aten.logical_and.default)
    less = masking.trial.before(op, f"{op.name}_less", aten.mul.Tensor, (op.args[0], SIXTH))
    masking.answer(op, mask, Ref(less), masking.zero(op))


def _by_numbers_alike(masking: _Masking, op: Op) -> None:
    map_, low, high = op.args[1:]
    outside = masking.ask(map_.value, _question(op), join=aten.logical_or.default)
    nan = masking.ask(map_.value, ((aten.ne.Tensor, map_),))
    inside = _inside(masking.graph.values[map_.value], low, high)
    assert inside is not None
    numbers = (masking.number(op, "outside", -math.inf), masking.number(op, "inside", inside))
    sides = masking.trial.before(op, f"{op.name}_sides", aten.where.self, (outside, *numbers))
    chosen = (nan, masking.number(op, "nan", math.nan), Ref(sides))
    alike = masking.trial.before(op, f"{op.name}_alike", aten.where.self, chosen)
    masking.editor.read_instead(op, map_.value, alike)


FORMULAS: Mapping[Any, Callable[[_Masking, Op], None]] = {
    aten.threshold_backward.default: _closed_below,
    aten.leaky_relu_backward.default: _less_below,
    aten.hardtanh_backward.default: _closed_outside,
    aten.hardsigmoid_backward.default: _less_inside,
}
UNEVEN_ABOUT_NAN = frozenset({aten.hardtanh_backward.default})
