"""A kernel with symbols in place of sizes: lowered for some sizes of a structure, checked and bound for others.

It runs for sizes of which each is what its expression gives for the values of the symbols, for which all guards of
tracing and of Inductor hold, and for which its results have the shapes and strides that the graph has. Nothing is
assumed: sizes that fail a check are compiled for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from encore.lower import torch_private
from encore.lower.arithmetic import evaluate_text
from encore.lower.extension import LoweringError
from encore.lower.fitting import fit
from encore.lower.module_text import read_module
from encore.lower.records import Rules
from encore.schedule.kernel import Kernel

Call = Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class SymbolicSource:
    """Inductor's module for a kernel with symbols, and the sizes that it is right for."""

    rules: Rules
    text: str

    def symbols(self, kernel: Kernel) -> tuple[int, ...] | None:
        """The values of its symbols for a kernel; None if it is not right for that one."""
        rules, sizes = self.rules, kernel.sizes
        if kernel.structure != rules.structure or len(sizes) != len(rules.expressions):
            return None
        symbols = tuple(sizes[position] for position in rules.symbols)
        names = _named(symbols)
        try:
            exact = all(evaluate_text(text, names) == size for text, size in zip(rules.expressions, sizes, strict=True))
            return symbols if exact and all(evaluate_text(guard, names) for guard in rules.guards) else None
        except LoweringError:
            return None

    def workspace(self, kernel: Kernel, symbols: Sequence[int]) -> int | None:
        """The workspace for these values; None if the results would not be those of the kernel."""
        try:
            found = read_module(self.text, symbols)
        except LoweringError:
            return None
        taken = {position for position, _ in kernel.over}
        shapes = [shape for position, shape in enumerate(kernel.shapes) if position not in taken]
        return found.workspace if found.shapes == shapes and kernel.accepts(found.strides) else None

    def fits(self, kernel: Kernel) -> bool:
        """Return whether it is right for a kernel."""
        symbols = self.symbols(kernel)
        return symbols is not None and self.workspace(kernel, symbols) is not None


@dataclass(frozen=True, slots=True)
class SymbolicKernel:
    """A compiled kernel with symbols. `call` takes their values in front of the operands."""

    source: SymbolicSource
    call: Call

    def bind(self, kernel: Kernel) -> tuple[Call, int] | None:
        """A call for the sizes of a kernel, and its workspace; None if it is not right for them."""
        symbols = self.source.symbols(kernel)
        workspace = None if symbols is None else self.source.workspace(kernel, symbols)
        if symbols is None or workspace is None:
            return None
        return _bound(self.call, symbols), workspace


def _bound(call: Call, symbols: tuple[int, ...]) -> Call:
    def run(operands: list[Any]) -> tuple[Any, ...]:
        operands[:0] = symbols
        return call(operands)

    return run


def lower_symbolic(kernel: Kernel, samples: Sequence[Sequence[int]]) -> SymbolicSource:
    """Lower a kernel with symbols for what differs between the sizes of some kernels, of which it is one."""
    fitted = fit(kernel, samples)
    hints = [kernel.sizes[position] for position in fitted.symbols]

    def kernel_of(symbols: Sequence[Any]) -> Kernel:
        names = _named(symbols)
        return kernel.with_sizes([evaluate_text(text, names) for text in fitted.expressions])

    text, guards = torch_private.symbolic_module_source(kernel, hints, kernel_of)
    source = SymbolicSource(Rules(kernel.structure, fitted.symbols, fitted.expressions, guards), text)
    if not source.fits(kernel):
        raise LoweringError("with symbols, it is not right for its own sizes")
    return source


def _named(symbols: Sequence[Any]) -> dict[str, Any]:
    return {f"s{number}": symbol for number, symbol in enumerate(symbols)}
