"""A small pattern matcher over graphs, for passes that are tables of (pattern, condition, replacement).

A pattern describes one argument of an operator: a tensor, a plain Python argument, or the operator that makes the
tensor, whose own arguments are described in turn. Matching starts at an operator and follows what it reads. Names
capture what stands in their place; a name that is captured already must stand for the same. Operands of a commutative
operator are tried in both orders, views in between may be skipped, and `only_use` asks that nothing else reads a value.

    OpPattern(aten.add.Tensor, OpPattern(aten.mm.default, ..., name="product", only_use=True), AnyTensor("addend"),
              commutes=True)

finds every sum of a product that is read nowhere else and another tensor. `rules.py` turns matches into new operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encore.graph import Graph, Op, OpClass
from encore.graph.needs import BackwardNeeds
from encore.graph.values import Ref, Value
from encore.rewrite.queries import exported, same_elements

Captures = Mapping[str, Any]
"""What the names of a pattern stand for: values by number, operators, plain arguments."""
NOTHING: Captures = {}


class Scope:
    """A graph, and facts about it that conditions ask for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.leaving = exported(graph)

    @functools.cached_property
    def needs(self) -> BackwardNeeds:
        return BackwardNeeds(self.graph)

    def is_read_once(self, value: int) -> bool:
        return len(self.graph.values[value].readers) == 1 and value not in self.leaving


@dataclass(frozen=True, slots=True)
class Match:
    """A place where a pattern fits, and what its names stand for there."""

    scope: Scope
    op: Op
    captures: Captures

    @property
    def graph(self) -> Graph:
        return self.scope.graph

    def __getitem__(self, name: str) -> Any:
        return self.captures[name]

    def value(self, name: str) -> Value:
        return self.graph.values[self.captures[name]]


class Pattern:
    """What may stand in one argument of an operator."""

    __slots__ = ()

    def fits(self, scope: Scope, argument: Any, captures: Captures) -> Iterator[Captures]:
        """Every way in which the pattern fits the argument: the captures so far and its own."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AnyTensor(Pattern):
    """Any tensor, or any that a pattern fits."""

    name: str = ""
    pattern: Pattern | None = None

    def fits(self, scope: Scope, argument: Any, captures: Captures) -> Iterator[Captures]:
        if isinstance(argument, Ref):
            for named in _captured(captures, self.name, argument.value):
                yield from [named] if self.pattern is None else self.pattern.fits(scope, argument, named)


@dataclass(frozen=True, slots=True)
class SameElements(Pattern):
    """A tensor that looks at the same elements in the same order as one that is captured, or at those of its
    transposed matrices."""

    name: str
    transposed: bool = False

    def fits(self, scope: Scope, argument: Any, captures: Captures) -> Iterator[Captures]:
        values, known = scope.graph.values, captures.get(self.name)
        if not isinstance(argument, Ref) or known is None:
            return
        if same_elements(values[argument.value], values[known], transposed=self.transposed):
            yield captures


@dataclass(frozen=True, slots=True)
class Argument(Pattern):
    """A plain Python argument: a number, a flag, a list of sizes."""

    name: str
    where: Callable[[Any], bool] | None = None

    def fits(self, scope: Scope, argument: Any, captures: Captures) -> Iterator[Captures]:
        if not isinstance(argument, Ref) and (self.where is None or self.where(argument)):
            yield from _captured(captures, self.name, argument)


class OpPattern(Pattern):
    """The first result of one of some operators. Its arguments are patterns, or plain values to be equal to; `...` at
    the end stands for any others."""

    __slots__ = ("any_kwargs", "arguments", "commutes", "forward", "name", "only_use", "targets")

    def __init__(
        self, target: Any, *arguments: Any, name: str = "", only_use: bool = False, commutes: bool = False,
        forward: bool | None = None, any_kwargs: bool = False,
    ) -> None:  # fmt: skip
        self.targets: tuple[Any, ...] = target if isinstance(target, tuple) else (target,)
        self.arguments = arguments
        self.name = name
        self.only_use = only_use
        """Whether its result must be read once, and not leave the graph."""
        self.commutes = commutes
        """Whether the first two arguments may come in either order."""
        self.forward = forward
        """The phase in which it must run, where that matters."""
        self.any_kwargs = any_kwargs
        """Whether it may have keyword arguments, whatever they are."""

    def fits(self, scope: Scope, argument: Any, captures: Captures) -> Iterator[Captures]:
        op = scope.graph.producer(argument.value) if isinstance(argument, Ref) else None
        if op is None or op.writes[0] != argument.value:
            return
        if not self.only_use or scope.is_read_once(argument.value):
            yield from self.fits_op(scope, op, captures)

    def fits_op(self, scope: Scope, op: Op, captures: Captures) -> Iterator[Captures]:
        if op.target not in self.targets or self.forward not in (None, op.forward):
            return
        if op.kwargs and not self.any_kwargs:
            return
        for named in _captured(captures, self.name, op):
            yield from _all_fit(scope, self.arguments, op.args, named)
            if self.commutes:
                yield from _all_fit(scope, self.arguments, (op.args[1], op.args[0], *op.args[2:]), named)


@dataclass(frozen=True, slots=True)
class Views(Pattern):
    """What a pattern describes, or a view of a view of it."""

    pattern: Pattern
    only_use: bool = False
    """Whether nothing but the views may read it."""

    def fits(self, scope: Scope, argument: Any, captures: Captures) -> Iterator[Captures]:
        yield from self.pattern.fits(scope, argument, captures)
        op = scope.graph.producer(argument.value) if isinstance(argument, Ref) else None
        if op is None or op.kind is not OpClass.VIEW or op.returns_tuple or len(op.reads) != 1:
            return
        if not self.only_use or scope.is_read_once(argument.value):
            yield from self.fits(scope, Ref(op.reads[0]), captures)


class OneOf(Pattern):
    """Any of several patterns."""

    __slots__ = ("patterns",)

    def __init__(self, *patterns: Pattern) -> None:
        self.patterns = patterns

    def fits(self, scope: Scope, argument: Any, captures: Captures) -> Iterator[Captures]:
        for pattern in self.patterns:
            yield from pattern.fits(scope, argument, captures)


def _captured(captures: Captures, name: str, found: Any) -> Iterator[Captures]:
    if not name:
        yield captures
    elif name not in captures:
        yield {**captures, name: found}
    elif captures[name] == found:
        yield captures


def _all_fit(scope: Scope, patterns: Sequence[Any], arguments: Sequence[Any], captures: Captures) -> Iterator[Captures]:
    """Every way in which patterns fit arguments, one by one."""
    if not patterns or patterns[0] is ...:
        if patterns or not arguments:
            yield captures
    elif arguments:
        pattern, argument = patterns[0], arguments[0]
        if isinstance(pattern, Pattern):
            found = pattern.fits(scope, argument, captures)
        else:
            found = iter([captures] if argument == pattern else [])
        for captured in found:
            yield from _all_fit(scope, patterns[1:], arguments[1:], captured)


def matches(scope: Scope, pattern: OpPattern, op: Op, captures: Captures = NOTHING) -> Iterator[Match]:
    """Every way in which the pattern fits an operator, given what is captured already."""
    return (Match(scope, op, found) for found in pattern.fits_op(scope, op, captures))
