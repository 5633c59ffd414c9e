"""The structure of a graph: what it computes, without the sizes it computes it on.

A batch of another length gives another graph of the same structure. What is decided for one of them may serve the
others, so structures are the keys of decisions and measurements.

**In it:** operators and their wiring; dtypes, devices and ranks; which dimensions are 0 or 1, since a dimension of one
element broadcasts; in which order dimensions lie in memory, and which of them repeat the same memory; the roles of
inputs, and what is returned; literals: the dimension of a sum, the stride of a convolution, an index to ignore.

**Not in it:** other sizes, also as literals. A literal is a size where the operator's schema has `SymInt`, except for
the arguments in `SETTINGS`; where an argument has one of the names in `SIZES`; or where a number, or an argument in
`STEPS`, equals the product of some dimensions of an operand or result, as the divisor of a mean does. 0, 1 and negative
numbers are never sizes.

There are two keys. Two graphs with the same `structure_key` have the same operators in the same order, and the same
values by number. Two graphs with the same `GraphStructure.key` have the same operators for the same modules and lines,
each any number of times: an unrolled loop has it for every number of steps. Graphs with the same `structure_key` have
the same `GraphStructure.key`, and then a value has the same number among those of its role.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from encore.graph.torch_private import OpOverload
from encore.graph.values import Graph, Op, Ref, Value, is_contiguous

SETTINGS = frozenset({
    "index", "padding_idx", "ignore_index", "step", "stride", "padding", "dilation", "kernel_size", "output_padding",
    "groups", "offset", "dim", "dims",
})  # fmt: skip
"""Arguments that the dispatcher takes as symbols and that are no sizes."""
SIZES = frozenset({"size", "sizes", "strides", "shape"})
"""Arguments that are sizes whatever their type."""
STEPS = frozenset({"keep"})
"""Arguments that may be as many as all steps of a sequence; any number of steps where these are not counted."""
COUNTERS = frozenset({"index", "start", "end", "fill_value"})
"""Arguments that count the steps of an unrolled loop, or are as many as these."""
NUMBERS = ("Scalar", "Tensor")
"""Types of arguments that may be numbers."""
SIZE = "n"


@dataclass(frozen=True, slots=True)
class GraphStructure:
    """The key of one graph, whatever the number of steps of its loops, and its sizes."""

    key: str
    sizes: tuple[int, ...]
    """Every dimension of its inputs, in order."""
    operators: int

    def is_near(self, other: GraphStructure, times: float) -> bool:
        """Return whether no size of a graph of the same loops differs by more than so many times."""
        pairs = [(self.operators, other.operators), *zip(self.sizes, other.sizes, strict=True)]
        return all(max(pair) <= times * min(pair) for pair in pairs if pair[0] != pair[1])

    def distance(self, other: GraphStructure) -> float:
        """How far the sizes of two graphs of the same loops are from each other."""
        pairs = [(self.operators, other.operators), *zip(self.sizes, other.sizes, strict=True)]
        return sum(abs(math.log(max(1, mine) / max(1, its))) for mine, its in pairs)


def structure_of(graph: Graph) -> GraphStructure:
    """The structure and the sizes of a graph."""
    places = {f"{place_of_module(op.module)} {op.source} {op_structure(graph, op, counted=False)}" for op in graph.ops}
    sizes = tuple(size for value in (*graph.primals, *graph.tangents) for size in graph.values[value].shape)
    return GraphStructure(_digest([*_inputs(graph), *sorted(places)]), sizes, len(graph.ops))


def structure_key(graph: Graph) -> str:
    """The key of graphs with the same operators in the same order."""
    lines = [f"{op_structure(graph, op)} {op.reads} {op.writes} {op.traced_in_forward}" for op in graph.ops]
    ends = (graph.outputs, graph.gradients, graph.returned, sorted(graph.leaves), sorted(graph.mutated))
    return _digest([*_inputs(graph), *lines, str(ends)])


def _inputs(graph: Graph) -> list[str]:
    """The tensors among the inputs; a number is the size of one."""
    inputs = [graph.values[value] for value in (*graph.primals, *graph.tangents)]
    return [f"{value.role} {value_structure(graph, value)}" for value in inputs if value.dtype is not None]


def op_structure(graph: Graph, op: Op, *, counted: bool = True) -> str:
    """An operator call without sizes and without the numbers of values; without the steps of loops, and how many of
    them it has in a list, unless they are `counted`."""
    named = _parameters(op.target)
    multiples = functools.cache(lambda: _multiples(graph, op))

    def listed(texts: Iterable[str]) -> list[str]:
        """The items of a list; a loop stacks as many as it has steps."""
        return [*texts] if counted else [text for text, _ in itertools.groupby(texts)]

    def text(argument: Any, name: str, kind: str) -> str:
        if isinstance(argument, Ref):
            return value_structure(graph, graph.values[argument.value])
        if isinstance(argument, tuple | list):
            return f"({','.join(listed(text(item, name, kind) for item in argument))})"
        if not counted and name in COUNTERS and isinstance(argument, int):
            return SIZE
        if isinstance(argument, bool) or not isinstance(argument, int | float) or argument < 2:
            return repr(argument)
        is_size = name in SIZES or (kind == "SymInt" and name not in SETTINGS) or (not counted and name in STEPS)
        may_be = kind in NUMBERS or name in STEPS
        return SIZE if is_size or (may_be and argument in multiples()) else repr(argument)

    args = [text(argument, *named(place)) for place, argument in enumerate(op.args)]
    args += [f"{name}={text(argument, *named(name))}" for name, argument in sorted(op.kwargs.items())]
    made = ["-" if value is None else value_structure(graph, graph.values[value]) for value in op.writes]
    return f"{_name(op.target)}({','.join(args)})->{','.join(listed(made))}"


def value_structure(graph: Graph, value: Value) -> str:
    """A tensor without its sizes."""
    device = "" if value.storage is None else graph.storages[value.storage].device
    return _layout(value.dtype, value.shape, value.stride, device, is_contiguous(value))


@functools.lru_cache(maxsize=8192)
def place_of_module(module: str) -> str:
    """The path of a module without numbers: the same for all layers of one kind."""
    return re.sub(r"\d+", "*", module)


@functools.lru_cache(maxsize=8192)
def _layout(dtype: Any, shape: tuple[int, ...], stride: tuple[int, ...], device: str, contiguous: bool) -> str:
    dims = ",".join(str(size) if size < 2 else SIZE for size in shape)
    order = ""
    if not contiguous and len(stride) == len(shape):
        large = [number for number, size in enumerate(shape) if size > 1]
        repeated = [number for number in large if stride[number] == 0]
        dense = any(stride[number] == 1 for number in large)
        order = f"{sorted(large, key=lambda number: -stride[number])}{repeated}{dense}"
    return f"{dtype}[{dims}]{order}{device}"


def _multiples(graph: Graph, op: Op) -> frozenset[float]:
    """The products of dimensions of the operands and results of an operator."""
    shapes = {graph.values[value].shape for value in (*op.reads, *op.writes) if value is not None}
    return frozenset(
        math.prod(chosen)
        for shape in shapes
        for count in range(1, len(shape) + 1)
        for chosen in itertools.combinations(shape, count)
    )


class _Parameters:
    """The name and the type of an operator's arguments, by place or name: `SymInt`, `Scalar`, `Tensor` or none."""

    def __init__(self, target: Any) -> None:
        self.known: dict[int | str, tuple[str, str]] = {}
        if isinstance(target, OpOverload):
            declared = str(target._schema)
            types = {name: kind for kind, name in re.findall(r"(SymInt|Scalar|Tensor)\S* (\w+)", declared)}
            for place, argument in enumerate(target._schema.arguments):
                self.known[place] = self.known[argument.name] = (argument.name, types.get(argument.name, ""))

    def __call__(self, place: int | str) -> tuple[str, str]:
        return self.known.get(place, ("", ""))


@functools.lru_cache(maxsize=4096)
def _parameters(target: Any) -> _Parameters:
    return _Parameters(target)


@functools.lru_cache(maxsize=4096)
def _name(target: Any) -> str:
    return str(target)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]
