"""Reading the module that Inductor wrote for a kernel: what does its `call` allocate beside its results?

Only what a fused kernel may do is understood: allocate, take a window, call a compiled function, forget, return. A
module that does more (it runs some operator outside of its kernel) is refused, since its memory cannot be told.
"""

from __future__ import annotations

import ast

import torch

from encore.lower.inductor_private import LoweringError


def bytes_aside(source: str) -> int:
    """The most bytes alive at once in `call`, less those of the results it returns."""
    (body,) = (
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "call" and len(node.args.args) == 2
    )
    return _Reader().read(body)


class _Reader:
    def __init__(self) -> None:
        self.buffer: dict[str, int] = {}
        """Name -> the allocation it looks at."""
        self.sizes: list[int] = []
        self.peak = 0

    def read(self, body: list[ast.stmt]) -> int:
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                case ast.Assign(targets=[ast.Tuple()], value=ast.Name(id="args")):
                    pass
                case ast.Delete(targets=targets):
                    for target in targets:
                        self.buffer.pop(getattr(target, "id", ""), None)
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="clear" | "run"))):
                    pass
                case ast.Expr(value=ast.Call(func=ast.Name())):
                    pass
                case ast.Return(value=ast.Tuple(elts=results)):
                    return self.peak - self._returned(results)
                case _:
                    raise LoweringError(f"its module does more than run a kernel: {ast.unparse(statement)}")
        raise LoweringError("its module returns nothing")

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(id=function), args=[shape, stride, dtype]) if "empty_strided" in function:
                self.buffer[name] = len(self.sizes)
                self.sizes.append(_bytes(shape, stride, dtype))
                self.peak = max(self.peak, sum(self.sizes[buffer] for buffer in set(self.buffer.values())))
            case ast.Name(id=other) | ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=other), *_]):
                if other in self.buffer:
                    self.buffer[name] = self.buffer[other]
            case _:
                raise LoweringError(f"its module does more than run a kernel: {name} = {ast.unparse(value)}")

    def _returned(self, results: list[ast.expr]) -> int:
        returned = []
        for result in results:
            match result:
                case (
                    ast.Name(id=name) | ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=name), *_])
                ) if name in self.buffer:
                    returned.append(self.buffer[name])
                case _:
                    raise LoweringError(f"its module returns something it did not allocate: {ast.unparse(result)}")
        if len(set(returned)) < len(returned):
            raise LoweringError("its module returns one buffer twice")
        return sum(self.sizes[buffer] for buffer in returned)


def _bytes(shape: ast.expr, stride: ast.expr, dtype: ast.expr) -> int:
    sizes, strides = ast.literal_eval(shape), ast.literal_eval(stride)
    kind = getattr(torch, getattr(dtype, "attr", ""))
    if 0 in sizes:
        return 0
    elements = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return elements * int(kind.itemsize)
