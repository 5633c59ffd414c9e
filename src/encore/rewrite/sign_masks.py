"""An activation of which backward needs signs alone is saved as booleans: one byte an element, not four; lossless.

That is Gist's Binarize, found in the graph: where every reader in backward needs no more than the side of a constant on
which an element lies (ReLU and its kin) or compares it (`clamp`, `maximum`, `abs`), forward makes that comparison right
after the activation, in the same kernel where there are kernels, and backward reads the mask. A bit an element is what
the planner makes of booleans where it pays. An activation that is needed whole by another reader is left as it is: next
to it, a mask would only add to what is saved.

The masks treat NaN as PyTorch's formulas do: ReLU's lets gradients through, LeakyReLU's takes it for negative. That
of `hardtanh` does one thing in its vector loop and another at the end of it, which no mask can express. Where bit
equality is asked for (`exact`), two masks are saved, one of NaN, and PyTorch's formula itself reads numbers that lie
where the activation's did: inside, outside, or NaN.

Narrow types are compared with a constant in their own type here, and in float32 by the formulas: constants that a type
cannot represent are left to the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from encore.graph import Graph, Op
from encore.graph.editor import Editor
from encore.graph.needs import COMPARISONS, Need, Reading
from encore.graph.values import Ref, Value
from encore.rewrite.matching import AnyTensor, Argument, Match, OpPattern, Scope, matches
from encore.rewrite.op_builder import OpBuilder
from encore.rewrite.queries import device_of, dtype_of, readers_of, represents, result_of
from encore.rewrite.rules import NewOp, call_of

aten = torch.ops.aten
SIXTH = float(torch.tensor(1.0 / 6.0, dtype=torch.float32))
"""What PyTorch's formula of `hardsigmoid` multiplies by, in float64 too."""
GRADIENT, ACTIVATION = AnyTensor("gradient"), AnyTensor("activation")
BOUND, LOW, HIGH, SLOPE = (Argument(name) for name in ("bound", "low", "high", "slope"))


@dataclass(frozen=True, slots=True)
class _Formula:
    """A formula of backward that needs signs alone, the mask of them that forward makes, and what backward computes
    from it."""

    pattern: OpPattern
    mask: NewOp
    replacement: NewOp
    nan: NewOp | None = None
    """A second mask, of elements that are NaN."""

    def sides(self, match: Match) -> tuple[tuple[Any, float], ...]:
        """The comparisons that make the mask: operator and constant."""
        parts = self.mask.arguments if isinstance(self.mask.arguments[0], NewOp) else (self.mask,)
        bounds = ((part.target, part.arguments[1]) for part in parts)
        return tuple((target, match[one.name] if isinstance(one, Argument) else one) for target, one in bounds)


def _in_forward(target: Any, *arguments: Any) -> NewOp:
    return NewOp(target, *arguments, after="activation")


def _number(number: Any) -> NewOp:
    """A constant, of the gradient's type."""
    return NewOp(aten.full.default, [], number, dtype=Argument("dtype"), device=Argument("device"))


def _where(*arguments: Any) -> NewOp:
    return NewOp(aten.where.self, *arguments)


def _scaled(factor: Any) -> NewOp:
    return NewOp(aten.mul.Tensor, GRADIENT, factor)


ZERO = _number(0)
BELOW = _in_forward(aten.le.Scalar, ACTIVATION, BOUND)
POSITIVE = _in_forward(aten.gt.Scalar, ACTIVATION, 0)
LOWER, HIGHER = _in_forward(aten.le.Scalar, ACTIVATION, LOW), _in_forward(aten.ge.Scalar, ACTIVATION, HIGH)
OUTSIDE = _in_forward(aten.logical_or.default, LOWER, HIGHER)
SLOPED = _in_forward(
    aten.logical_and.default,
    _in_forward(aten.gt.Scalar, ACTIVATION, -3),
    _in_forward(aten.lt.Scalar, ACTIVATION, 3),
)
NAN = _in_forward(aten.ne.Tensor, ACTIVATION, ACTIVATION)
LIKEWISE = _where(NAN, _number(math.nan), _where(OUTSIDE, _number(-math.inf), _number(Argument("inside"))))
"""Numbers that lie where the activation's do."""

THRESHOLD = OpPattern(aten.threshold_backward.default, GRADIENT, ACTIVATION, BOUND)
LEAKY_RELU = OpPattern(aten.leaky_relu_backward.default, GRADIENT, ACTIVATION, SLOPE, ...)
HARDSIGMOID = OpPattern(aten.hardsigmoid_backward.default, GRADIENT, ACTIVATION)
HARDTANH = OpPattern(aten.hardtanh_backward.default, GRADIENT, ACTIVATION, LOW, HIGH)
FORMULAS = (
    _Formula(THRESHOLD, BELOW, _where(BELOW, ZERO, GRADIENT)),
    _Formula(LEAKY_RELU, POSITIVE, _where(POSITIVE, GRADIENT, _scaled(SLOPE))),
    _Formula(HARDSIGMOID, SLOPED, _where(SLOPED, _scaled(SIXTH), ZERO)),
    _Formula(HARDTANH, OUTSIDE, _where(OUTSIDE, ZERO, GRADIENT)),
)
EXACT_FORMULAS = (
    *FORMULAS[:-1],
    _Formula(HARDTANH, OUTSIDE, NewOp(aten.hardtanh_backward.default, GRADIENT, LIKEWISE, LOW, HIGH), nan=NAN),
)


def apply(graph: Graph, *, exact: bool) -> Graph:
    """The graph with such activations saved as booleans."""
    return _Masking(graph, EXACT_FORMULAS if exact else FORMULAS).run()


class _Masking:
    def __init__(self, graph: Graph, formulas: tuple[_Formula, ...]) -> None:
        self.graph = graph
        self.editor = Editor(graph)
        self.builder = OpBuilder(self.editor)
        self.scope = Scope(graph)
        self.formulas = formulas
        self.early = _early_comparisons(graph)
        self.moved: set[int] = set()

    def run(self) -> Graph:
        needs = self.scope.needs
        for storage, readings in needs.of.items():
            if not needs.is_kept_whole(storage) and self._pays(storage, readings):
                for reading in readings:
                    if reading.op.id in self.early:
                        self._compare_in_forward(reading.op)
                    elif reading.need is Need.SIGN:
                        for formula, match in self._formula(reading.op):
                            self._replace(formula, match)
        return self.editor.finish()

    def _formula(self, op: Op) -> Iterator[tuple[_Formula, Match]]:
        """The formula that an operator is, if it is one."""
        return ((formula, match) for formula in self.formulas for match in matches(self.scope, formula.pattern, op))

    def _pays(self, storage: int, readings: list[Reading]) -> bool:
        """Return whether every reader can be served, from fewer bytes."""
        signs = [reading for reading in readings if reading.need is Need.SIGN]
        first = self.graph.values[self.graph.storages[storage].values[0]]
        if not signs or first.dtype is None or not first.dtype.is_floating_point:
            return False
        masks: dict[Any, int] = {}
        """Bytes of the booleans, by comparison."""
        for reading in signs:
            op, value = reading.op, self.graph.values[reading.value]
            if value.producer is None:
                return False
            if op.id in self.early:
                masks[op.id] = self.graph.values[result_of(op)].bytes
                continue
            formula, match = next(self._formula(op), (None, None))
            if formula is None or match is None or not self._can_replace(formula, match):
                return False
            masks[formula.sides(match)] = (1 + (formula.nan is not None)) * math.prod(value.shape)
        return sum(masks.values()) < self.graph.storages[storage].bytes

    def _can_replace(self, formula: _Formula, match: Match) -> bool:
        """Return whether a comparison with its constants gives what the formula would find."""
        activation, gradient = match.value("activation"), match.value("gradient")
        sides = formula.sides(match)
        if not all(represents(activation, bound) for _, bound in sides):
            return False
        target, bound = sides[0]
        mask = self.builder.described(target, (Ref(activation.id), bound))
        if formula.nan is None:
            chosen = self.builder.described(aten.where.self, (mask, Ref(gradient.id), Ref(gradient.id)))
            return self.builder.copying_into(chosen, self.graph.values[result_of(match.op)].stride) is not None
        # What is laid out in two ways makes a result that lies as PyTorch likes it, and sums of it follow its order.
        laid_out = tuple(mask.stride()) == activation.stride == gradient.stride
        return laid_out and gradient.dtype is activation.dtype and _inside(activation, *match.op.args[2:]) is not None

    def _replace(self, formula: _Formula, match: Match) -> None:
        """Have the formula's result computed from the mask, and laid out as it was."""
        op, gradient = match.op, match["gradient"]
        captures = {**match.captures, "dtype": dtype_of(self.graph, gradient)}
        captures["device"] = torch.device(device_of(self.graph, gradient))
        if formula.nan is not None:
            captures["inside"] = _inside(match.value("activation"), match["low"], match["high"])
        target, args, _ = call_of(self.builder, formula.replacement, Match(match.scope, op, captures))
        described, wanted = self.builder.described(target, args), self.graph.values[result_of(op)].stride
        if tuple(described.stride()) == wanted:
            self.builder.replace(op, target, args)
            return
        computed = self.builder.before(op, f"{op.name}_where", target, args)
        layout = {"memory_format": self.builder.copying_into(described, wanted)}
        self.builder.replace(op, aten.clone.default, (Ref(computed),), layout)

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
            pending += [reader for reader in readers_of(self.graph, result_of(moving)) if reader.id in self.early]

    def _move(self, op: Op, makers: list[Op]) -> None:
        moved = self.editor.graph.ops[op.id]
        moved.forward = True
        self.moved.add(op.id)
        self.editor.place_after(moved, [self.editor.graph.ops[maker.id] for maker in makers])


def _inside(activation: Value, low: float, high: float) -> float | None:
    """A number between two others, in the type of an activation."""
    assert activation.dtype is not None
    ends = torch.tensor([low, high], dtype=activation.dtype)
    numbers = torch.tensor([(low + high) / 2, 0.0, low + 1, high - 1], dtype=activation.dtype)
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
