"""The workspace of a kernel, read from the module that Inductor wrote for it: what `call` allocates beyond its results.

A module may allocate, take a view, call a compiled function, delete and return. One that does more (it runs an operator
outside of its kernel) is rejected, since its workspace is unknown.
"""

from __future__ import annotations

import ast

import torch

from encore.lower.extension import LoweringError


def workspace_bytes(source: str) -> int:
    """The most bytes alive at once in `call`, less those of the results it returns."""
    reader = _read(source)
    return reader.peak - sum(reader.sizes[buffer] for buffer in reader.returned)


def returned_strides(source: str) -> list[tuple[int, ...]]:
    """The strides of the results, in their order."""
    return _read(source).strides


def _read(source: str) -> _Reader:
    (body,) = (
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "call" and len(node.args.args) == 2
    )
    reader = _Reader()
    if not reader.read(body):
        raise LoweringError("its module returns nothing")
    return reader


class _Reader:
    def __init__(self) -> None:
        self.buffer: dict[str, int] = {}
        """Name -> the number of its allocation."""
        self.stride: dict[str, tuple[int, ...]] = {}
        self.sizes: list[int] = []
        self.peak = 0
        self.returned: list[int] = []
        self.strides: list[tuple[int, ...]] = []

    def read(self, body: list[ast.stmt]) -> bool:
        """Follow the statements; return whether they end with a `return`."""
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                case ast.Assign(targets=[ast.Tuple()], value=ast.Name(id="args")):
                    pass
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
                self.buffer[name] = len(self.sizes)
                self.stride[name] = ast.literal_eval(stride)
                self.sizes.append(_bytes(shape, stride, dtype))
                self.peak = max(self.peak, sum(self.sizes[buffer] for buffer in set(self.buffer.values())))
            case ast.Name(id=other) | ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=other), *_]):
                if other in self.buffer:
                    self.buffer[name] = self.buffer[other]
                    self.stride[name] = self._stride_of(value)
            case ast.Call(func=ast.Name(id="get_raw_stream")):
                pass
            case ast.Call(func=ast.Name(id="copy_if_misaligned"), args=[ast.Name(id=other)]) if other == name:
                pass  # CUDA: operands that the schedule allocates are aligned, as are whole tensors of the caller
            case _:
                raise LoweringError(f"its module does more than run a kernel: {name} = {ast.unparse(value)}")

    def _stride_of(self, value: ast.expr) -> tuple[int, ...]:
        """The strides of a name, or of a view `reinterpret_tensor(base, shape, stride, offset)`."""
        match value:
            case ast.Name(id=name):
                return self.stride[name]
            case ast.Call(args=[_, _, stride, *_]):
                return tuple(ast.literal_eval(stride))
        raise LoweringError(f"its module takes a view of an unknown kind: {ast.unparse(value)}")

    def _return(self, results: list[ast.expr]) -> None:
        for result in results:
            match result:
                case (
                    ast.Name(id=name) | ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=name), *_])
                ) if name in self.buffer:
                    self.returned.append(self.buffer[name])
                    self.strides.append(self._stride_of(result))
                case _:
                    raise LoweringError(f"its module returns something it did not allocate: {ast.unparse(result)}")
        if len(set(self.returned)) < len(self.returned):
            raise LoweringError("its module returns one buffer twice")


def _bytes(shape: ast.expr, stride: ast.expr, dtype: ast.expr) -> int:
    sizes, strides = ast.literal_eval(shape), ast.literal_eval(stride)
    kind = getattr(torch, getattr(dtype, "attr", ""))
    if 0 in sizes:
        return 0
    elements = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return elements * int(kind.itemsize)
