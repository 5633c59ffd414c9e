"""The workspace of a kernel, read from the module that Inductor wrote for it: what `call` allocates beyond its results.

A module may allocate, take a view, call a compiled function, delete and return. One that does more (it runs an operator
outside of its kernel) is rejected, since its workspace is unknown. The module of a kernel with symbols takes their
values first; what it allocates is computed for the values of one kernel.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from encore.lower.arithmetic import evaluate
from encore.lower.extension import LoweringError


@dataclass(frozen=True, slots=True)
class ModuleText:
    """What a module's text says about its memory."""

    workspace: int
    """The most bytes alive at once in `call`, less those of the results it returns."""
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    """Of the results, in their order."""


def read_module(source: str, symbols: Sequence[int] = ()) -> ModuleText:
    """Read a module's text for these values of its symbols."""
    reader = _Reader(symbols)
    if not reader.read(_body(source)):
        raise LoweringError("its module returns nothing")
    workspace = reader.peak - sum(reader.bytes[buffer] for buffer in reader.returned)
    return ModuleText(workspace, reader.shapes, reader.strides)


@functools.lru_cache(maxsize=64)
def _body(source: str) -> list[ast.stmt]:
    (body,) = (
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "call" and len(node.args.args) == 2
    )
    return body


class _Reader:
    def __init__(self, symbols: Sequence[int]) -> None:
        self.symbols = symbols
        self.sizes: dict[str, int] = {}
        """Name -> value of symbols and what is computed from them."""
        self.buffer: dict[str, int] = {}
        """Name -> the number of its allocation."""
        self.layout: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Name -> shape and strides."""
        self.bytes: list[int] = []
        self.peak = 0
        self.returned: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.strides: list[tuple[int, ...]] = []

    def read(self, body: list[ast.stmt]) -> bool:
        """Follow the statements; return whether they end with a `return`."""
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                case ast.Assign(targets=[ast.Tuple(elts=given)], value=ast.Name(id="args")):
                    names = [target.id for target in given if isinstance(target, ast.Name)]
                    self.sizes.update(zip(names, self.symbols, strict=False))
                case ast.Delete(targets=targets):
                    for target in targets:
                        self.buffer.pop(getattr(target, "id", ""), None)
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="clear" | "run" | "set_device"))):
                    pass
                case ast.Expr(value=ast.Call(func=ast.Name())):
                    pass
                case ast.With(body=inner):  # CUDA: the device that the kernel runs on
                    if self.read(inner):
                        return True
                case ast.Return(value=ast.Tuple(elts=results)):
                    self._return(results)
                    return True
                case _:
                    raise LoweringError(f"its module does more than run a kernel: {ast.unparse(statement)}")
        return False

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(id=function), args=[shape, stride, dtype]) if "empty_strided" in function:
                self.buffer[name] = len(self.bytes)
                self.layout[name] = self._numbers(shape), self._numbers(stride)
                self.bytes.append(_bytes(*self.layout[name], dtype))
                self.peak = max(self.peak, sum(self.bytes[buffer] for buffer in set(self.buffer.values())))
            case ast.Name(id=other) | ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=other), *_]):
                if other in self.buffer:
                    self.buffer[name] = self.buffer[other]
                    self.layout[name] = self._layout_of(value)
                elif other in self.sizes:
                    self.sizes[name] = self.sizes[other]
            case ast.BinOp() | ast.Constant() if self.sizes:
                self.sizes[name] = evaluate(value, self.sizes)
            case ast.Call(func=ast.Name(id="get_raw_stream")):
                pass
            case ast.Call(func=ast.Name(id="copy_if_misaligned"), args=[ast.Name(id=other)]) if other == name:
                pass  # CUDA: operands that the schedule allocates are aligned, as are whole tensors of the caller
            case _:
                raise LoweringError(f"its module does more than run a kernel: {name} = {ast.unparse(value)}")

    def _numbers(self, node: ast.expr) -> tuple[int, ...]:
        if not isinstance(node, ast.Tuple):
            raise LoweringError(f"its module has no numbers for a layout: {ast.unparse(node)}")
        return tuple(evaluate(one, self.sizes) for one in node.elts)

    def _layout_of(self, value: ast.expr) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a name, or of a view `reinterpret_tensor(base, shape, stride, offset)`."""
        match value:
            case ast.Name(id=name):
                return self.layout[name]
            case ast.Call(args=[_, shape, stride, *_]):
                return self._numbers(shape), self._numbers(stride)
        raise LoweringError(f"its module takes a view of an unknown kind: {ast.unparse(value)}")

    def _return(self, results: list[ast.expr]) -> None:
        for result in results:
            match result:
                case (
                    ast.Name(id=name) | ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=name), *_])
                ) if name in self.buffer:
                    self.returned.append(self.buffer[name])
                    shape, strides = self._layout_of(result)
                    self.shapes.append(shape)
                    self.strides.append(strides)
                case _:
                    raise LoweringError(f"its module returns something it did not allocate: {ast.unparse(result)}")
        if len(set(self.returned)) < len(self.returned):
            raise LoweringError("its module returns one buffer twice")


def _bytes(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: ast.expr) -> int:
    kind = getattr(torch, getattr(dtype, "attr", ""))
    if 0 in sizes:
        return 0
    elements = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return elements * int(kind.itemsize)
