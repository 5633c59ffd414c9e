"""From the sizes of some kernels of one structure to symbols and expressions that give every size of each of them.

Sizes that are equal in all samples stay numbers. Sizes that differ are taken from the smallest up: one that is a
multiple of a product of earlier symbols becomes that expression (rows of a batch: `s0*s1`), another one becomes a
symbol. A stride is the next inner stride times its size where that is right. So two samples can be fitted by chance;
that costs time, never correctness: a kernel runs only for sizes that its expressions give exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from encore.lower.extension import LoweringError
from encore.schedule.kernel import Kernel, Operand

MOST_SYMBOLS = 6
HIGHEST_DEGREE = 3
NEAR = 2
"""A size of an operator may be this much more or less than a symbol (all steps but the last)."""

Column = tuple[int, ...]
"""The values of one size in all samples."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Symbols `s0`, `s1`, ... of a structure."""

    symbols: tuple[int, ...]
    """For each, the position of a size that is its value."""
    expressions: tuple[str, ...]
    """For each size of the structure."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A size of a kernel, by position."""

    position: int

    def __rtruediv__(self, number: float) -> float:
        return number


def fit(kernel: Kernel, samples: Sequence[Sequence[int]]) -> Fit:
    """Fit expressions to the sizes of several kernels of one structure, of which `kernel` is one."""
    columns = list(zip(*samples, strict=True))
    places = kernel.with_sizes([_Place(position) for position in range(len(columns))])
    fitting = _SizeFitting(columns)
    strides = _positions(operand.stride for operand in places.operands)
    shapes = _positions(operand.shape for operand in places.operands)
    given = set(range(len(columns))) - strides
    fitting.add(shapes, near=0)
    fitting.add(given - shapes, near=NEAR)
    for operand in places.operands:
        fitting.add_strides(operand)
    if not fitting.symbols or len(fitting.symbols) > MOST_SYMBOLS:
        raise LoweringError(f"its sizes differ in {len(fitting.symbols)} ways")
    return Fit(tuple(fitting.symbols.values()), tuple(fitting.expressions[column] for column in columns))


def _positions(places: Iterable[Sequence[Any]]) -> set[int]:
    return {one.position for several in places for one in several if isinstance(one, _Place)}


class _SizeFitting:
    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns
        self.symbols: dict[Column, int] = {}
        self.expressions: dict[Column, str] = {column: str(column[0]) for column in columns if len(set(column)) == 1}

    def add(self, positions: Iterable[int], near: int) -> None:
        """Find expressions for sizes, the smallest first; what is neither known nor a product becomes a symbol."""
        for column, position in sorted((self.columns[position], position) for position in positions):
            if column not in self.expressions:
                found = self._product(column) or self._neighbour(column, near)
                self.expressions[column] = found or self._symbol(column, position)

    def add_strides(self, operand: Operand) -> None:
        """Find expressions for an operand's strides, the innermost first."""
        inner: tuple[Any, Any] = (1, 1)
        pairs = zip(operand.stride, operand.shape, strict=True)
        for stride, size in sorted(pairs, key=lambda pair: self._values(pair[0])):
            if isinstance(stride, _Place):
                column = self.columns[stride.position]
                if column not in self.expressions:
                    dense = tuple(map(math.prod, zip(*map(self._values, inner), strict=True)))
                    text = "*".join(self._text(one) for one in inner)
                    found = text if dense == column else self._product(column)
                    self.expressions[column] = found or self._symbol(column, stride.position)
            if stride != 0:
                inner = stride, size

    def _values(self, one: Any) -> Column:
        return self.columns[one.position] if isinstance(one, _Place) else (one,) * len(self.columns[0])

    def _text(self, one: Any) -> str:
        return self.expressions[self.columns[one.position]] if isinstance(one, _Place) else str(one)

    def _symbol(self, column: Column, position: int) -> str:
        self.symbols[column] = position
        return f"s{len(self.symbols) - 1}"

    def _product(self, column: Column) -> str:
        """A number times a product of symbols; empty if there is none."""
        named = {column: f"s{number}" for number, column in enumerate(self.symbols)}
        for degree in range(1, HIGHEST_DEGREE + 1):
            for factors in itertools.combinations_with_replacement(named, degree):
                products = [math.prod(values) for values in zip(*factors, strict=True)]
                times, rest = divmod(column[0], products[0])
                if (
                    times
                    and not rest
                    and all(times * product == one for product, one in zip(products, column, strict=True))
                ):
                    return "*".join([*([str(times)] if times > 1 else []), *(named[factor] for factor in factors)])
        return ""

    def _neighbour(self, column: Column, near: int) -> str:
        """A symbol and a small number; empty if there is none."""
        for number, symbol in enumerate(self.symbols):
            apart = {one - other for one, other in zip(column, symbol, strict=True)}
            if len(apart) == 1 and abs(*apart) <= near:
                return f"(s{number} + {apart.pop()})"
        return ""
