"""Arithmetic on sizes as text: what Inductor and `ShapeEnv` write about symbols, evaluated for the numbers of a kernel.

Only numbers, names, `+ - * // % **`, comparisons, `and`, `or`, `not`, `min` and `max` are understood. Anything else is
rejected, so text of a record cannot do more than compute a number.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from encore.lower.extension import LoweringError

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
CALLED: dict[str, Callable[..., Any]] = {"max": max, "min": min, "Max": max, "Min": min}
LARGEST_POWER = 8


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """The expression of a text, which need not be one that `evaluate` understands."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LoweringError(f"{text[:80]!r} is not an expression ({error})") from error


def evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression; raise `LoweringError` if it is not plain arithmetic on these names."""
    match node:
        case ast.Constant(value=value) if isinstance(value, int):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 0 <= power <= LARGEST_POWER:
            return evaluate(left, names) ** power
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            try:
                return BINARY[type(op)](evaluate(left, names), evaluate(right, names))
            except ZeroDivisionError as error:
                raise LoweringError(f"{ast.unparse(node)} divides by zero") from error
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand, names)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not evaluate(operand, names)
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)(evaluate(value, names) for value in values)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARED for op in ops):
            given = [evaluate(one, names) for one in (left, *others)]
            return all(COMPARED[type(op)](*pair) for op, pair in zip(ops, itertools.pairwise(given), strict=True))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in CALLED and args:
            return CALLED[name](*(evaluate(arg, names) for arg in args))
    raise LoweringError(f"{ast.unparse(node)[:80]} is more than arithmetic on sizes")


def evaluate_text(text: str, names: Mapping[str, Any]) -> Any:
    """The value of a text; raise `LoweringError` if it is not plain arithmetic on these names."""
    return evaluate(parse(text), names)
