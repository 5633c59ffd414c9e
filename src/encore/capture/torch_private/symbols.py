"""Symbols for sizes: which dimensions Dynamo traces with one, and what they stand for in what it traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")
"""What `maybe_mark_dynamic` sets on a tensor. Dynamo guards on it: a tensor must not keep it after the call."""


@contextlib.contextmanager
def symbolic_dimensions(marked: Sequence[tuple[torch.Tensor, Collection[int]]]) -> Iterator[None]:
    """Have Dynamo trace these dimensions of arguments with symbols, as far as the code allows. Tensors that the user
    has marked are left alone."""
    touched = []
    for tensor, dimensions in marked:
        windows = [(tensor, list(dimensions))]
        base = tensor._base
        if base is not None:  # a view has a symbol only if the tensor behind it may have other sizes, too
            windows.append((base, list(range(base.dim()))))
        for one, its in windows:
            if not any(hasattr(one, name) for name in MARKS):
                torch._dynamo.maybe_mark_dynamic(one, its)
                touched.append(one)
    try:
        yield
    finally:
        for tensor in touched:
            for name in MARKS:
                if hasattr(tensor, name):
                    delattr(tensor, name)


def marked_dimensions(tensor: Any) -> Collection[int]:
    """The dimensions of an argument that are to be traced with symbols."""
    return getattr(tensor, MARKS[0], ()) if isinstance(tensor, torch.Tensor) else ()


def pin_sizes(module: fx.GraphModule) -> None:
    """Guard every symbolic size of the inputs to the number it has now: each shape gets a graph of its own."""
    for number in _sizes_of_inputs(module):
        pin(number)


def pin(number: Any) -> Any:
    """The number that a symbolic one stands for, guarded to be that."""
    if isinstance(number, torch.SymInt):
        return int(number)
    if isinstance(number, torch.SymFloat):
        return float(number)
    return bool(number) if isinstance(number, torch.SymBool) else number


def has_symbols(module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo's is for several sizes of its inputs."""
    return any(isinstance(number, SYMBOLIC_NUMBERS) and free_symbols(number) for number in _sizes_of_inputs(module))


def keeps_marked_dimensions(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether all dimensions that were to be traced with symbols still have one, in the tensors that a graph of
    Dynamo's reads. Code that needs a number (a loop over time steps) makes it a constant, with a guard."""
    for node, given in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        example = node.meta.get("example_value")
        for dimension in marked_dimensions(given):
            size = example.shape[dimension]
            if not (isinstance(size, torch.SymInt) and free_symbols(size)):
                return False
    return True


def _sizes_of_inputs(module: fx.GraphModule) -> Iterator[Any]:
    for node in module.graph.find_nodes(op="placeholder"):
        example = node.meta.get("example_value")
        if isinstance(example, SYMBOLIC_NUMBERS):
            yield example
        elif isinstance(example, torch.Tensor):
            strides = example.stride() if example.layout is torch.strided else ()
            yield from (*example.shape, *strides, *([example.storage_offset()] if strides else []))


def expression_of(number: Any) -> sympy.Basic:
    """What a symbolic number is, in symbols."""
    return number.node.expr  # type: ignore[no-any-return]


def free_symbols(number: Any) -> frozenset[sympy.Basic]:
    """The symbols in a symbolic number."""
    return frozenset(expression_of(number).free_symbols)


def new_symbol(name: str) -> sympy.Symbol:
    """A symbol for a number that Dynamo has none for."""
    return sympy.Symbol(name, integer=True, positive=True)


def hint_of(number: Any) -> Any:
    """The value of a symbolic number for the sizes that were traced; None if it depends on data."""
    return number.node.hint if number.node.has_hint() else None


def formula(symbols: Sequence[sympy.Symbol], expressions: Sequence[sympy.Basic]) -> Callable[..., tuple[Any, ...]]:
    """A function from values of the symbols to those of the expressions. Raises `ValueError` for expressions that are
    more than arithmetic."""
    printer = PythonPrinter()
    numbers = "".join(f"{printer.doprint(one)}, " for one in expressions)
    try:
        code: CodeType = compile(f"lambda {', '.join(map(str, symbols))}: ({numbers})", "<encore sizes>", "eval")
    except SyntaxError as error:
        raise ValueError(f"sizes of the graph are not plain arithmetic ({error})") from None
    known = {"math": math, "min": min, "max": max, "abs": abs, "round": round, "int": int, "float": float, "bool": bool}
    function: Callable[..., tuple[Any, ...]] = eval(code, {"__builtins__": {}, **known})
    return function
