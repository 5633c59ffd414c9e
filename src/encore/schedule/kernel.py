"""A fused kernel by what it computes: operators, wiring, shapes, strides, types, constants. Nothing of who asked.

Two time steps or two layers that do the same have equal kernels, so each is compiled once whatever their number.

A kernel without its sizes is its structure: what kernels for batches of different lengths have in common. Sizes are
the numbers above one in the shapes and strides of operands and where an operator takes a size or a scalar; a scalar
that is one over a size (a mean) follows it. Zeros and ones belong to the structure, since they change what an operator
does (broadcasting), as do dimensions, types and the order of strides.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encore.graph import Graph, Op
from encore.graph.values import Ref, map_refs

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Group:
    """Operators of a graph that are to run as one; it reads and writes as an operator does."""

    ops: tuple[Op, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


ALIGNMENT = 16
"""Bytes that a vector load on CUDA wants an operand's address to be a multiple of."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a kernel is given, or one that it writes over."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    aligned: bool


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One operator of a kernel. `Ref`s count the operands first, then the results of the calls before."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[bool, ...]
    """By position, whether it is a tensor."""
    returns_tuple: bool


@dataclass(frozen=True)
class Kernel:
    """What is compiled. `over` pairs a position among the outputs with the operand whose memory it takes."""

    operands: tuple[Operand, ...]
    calls: tuple[KernelCall, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[tuple[int, ...], ...]
    """Strides that the outputs must have."""
    over: tuple[tuple[int, int], ...]

    @functools.cached_property
    def text(self) -> str:
        """Everything in which this kernel may differ from another, as text."""
        lines = [f"%{number} = {_operand_text(operand)}" for number, operand in enumerate(self.operands)]
        lines += [_aloud(call) for call in self.calls]
        return "\n".join([*lines, f"return {self.outputs} {self.layouts} over {self.over}"])

    @functools.cached_property
    def key(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The numbers that its structure leaves out, in order; for a scalar that is one over a size, that size."""
        found: list[int] = []

        def collect(number: Any) -> Any:
            if _is_size(number):
                found.append(number)
            elif type(number) is float and number in self._shares:
                found.append(self._shares[number])
            return number

        _with_numbers(self, collect)
        return tuple(found)

    @functools.cached_property
    def _shares(self) -> dict[float, int]:
        """One over a size -> that size."""
        found: dict[float, int] = {}

        def collect(number: Any) -> Any:
            if _is_size(number):
                found[1 / number] = number
            return number

        _with_numbers(self, collect)
        return found

    @functools.cached_property
    def structure(self) -> str:
        """The hash of everything but the sizes: equal for kernels that `with_sizes` makes of each other."""
        hollow = self.with_sizes([_BLANK] * len(self.sizes))
        orders = [_order(stride) for stride in (*(operand.stride for operand in self.operands), *self.layouts)]
        lines = [str(operand) for operand in hollow.operands]
        lines += [_aloud(call) for call in hollow.calls]
        text = "\n".join([*lines, f"return {self.outputs} over {self.over} ordered {orders}"])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def with_sizes(self, sizes: Sequence[Any]) -> Kernel:
        """This kernel with other sizes in operands and operators; its outputs' shapes and layouts stay."""
        remaining = iter(sizes)

        def replace(number: Any) -> Any:
            if _is_size(number):
                return next(remaining)
            return 1 / next(remaining) if type(number) is float and number in self._shares else number

        return _with_numbers(self, replace)

    def accepts(self, strides: Sequence[tuple[int, ...]]) -> bool:
        """Return whether its results may have these layouts. Those that go over an operand have its layout anyway; the
        stride of a dimension with one element means nothing."""
        taken = {position for position, _ in self.over}
        wanted = [
            (shape, layout)
            for position, (shape, layout) in enumerate(zip(self.shapes, self.layouts, strict=True))
            if position not in taken
        ]
        return len(wanted) == len(strides) and all(
            len(layout) == len(found)
            and all(size == 1 or mine == its for size, mine, its in zip(shape, layout, found, strict=True))
            for (shape, layout), found in zip(wanted, strides, strict=True)
        )

    @functools.cached_property
    def devices(self) -> set[str]:
        """Those of its operands, and those on which it makes tensors (a mask) without one."""
        made = {str(given) for call in self.calls for _, given in call.kwargs if isinstance(given, torch.device)}
        return {operand.device for operand in self.operands} | made


@dataclass(frozen=True)
class _Blank:
    """Stands for a size in the text of a structure."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def __rtruediv__(self, number: int) -> _Blank:
        return _Blank(f"{number} / {self.text}")


_BLANK = _Blank("#")
LARGEST_SIZE = 1 << 62
"""Numbers from here on mean "to the end"."""


def _is_size(number: Any) -> bool:
    return type(number) is int and 1 < number < LARGEST_SIZE


def _order(stride: Sequence[int]) -> list[int]:
    return sorted(range(len(stride)), key=lambda position: (-stride[position], position))


def _with_numbers(kernel: Kernel, change: Callable[[Any], Any]) -> Kernel:
    """The kernel with every number changed that may be a size: those of its operands, then those of its calls."""
    operands = tuple(
        dataclasses.replace(operand, shape=tuple(map(change, operand.shape)), stride=tuple(map(change, operand.stride)))
        for operand in kernel.operands
    )
    return dataclasses.replace(kernel, operands=operands, calls=tuple(_changed(call, change) for call in kernel.calls))


def _changed(call: KernelCall, change: Callable[[Any], Any]) -> KernelCall:
    places = _places_of_sizes(call.target)
    return dataclasses.replace(
        call,
        args=tuple(_each(arg, change) if place in places else arg for place, arg in enumerate(call.args)),
        kwargs=tuple((name, _each(arg, change) if name in places else arg) for name, arg in call.kwargs),
    )


def _each(argument: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(argument, tuple | list):
        return type(argument)(change(item) for item in argument)
    return change(argument)


@functools.lru_cache(maxsize=4096)
def _places_of_sizes(target: Any) -> frozenset[int | str]:
    """Positions and names of the arguments that are sizes or scalars, not dimensions or flags."""
    found: set[int | str] = set()
    for position, declared in enumerate(target._schema.arguments):
        kind = declared.real_type
        while kind.kind() in ("OptionalType", "ListType"):
            kind = kind.getElementType()
        if kind.kind() in ("SymIntType", "NumberType", "TensorType"):  # a number may stand for a tensor
            found |= {position, declared.name}
    return frozenset(found)


def _aloud(call: KernelCall) -> str:
    kwargs = "".join(f", {name}={_text(argument)}" for name, argument in call.kwargs)
    return f"{_name(call.target)}({', '.join(_text(argument) for argument in call.args)}{kwargs})"


@functools.lru_cache(maxsize=4096)
def _name(target: Any) -> str:
    return str(target)


@functools.lru_cache(maxsize=4096)
def _operand_text(operand: Operand) -> str:
    return str(operand)


def _text(argument: Any) -> str:
    if isinstance(argument, Ref):
        return f"%{argument.value}"
    if isinstance(argument, tuple | list):
        return f"[{', '.join(_text(item) for item in argument)}]"
    return repr(argument)


CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_describable(argument: Any) -> bool:
    """Return whether a kernel's text can describe this argument in full."""
    if isinstance(argument, tuple | list):
        return all(is_describable(item) for item in argument)
    return isinstance(argument, (Ref, *CONSTANTS))


def describe_kernel(graph: Graph, group: Group, over: Iterable[tuple[int, int]]) -> Kernel:
    """The kernel that runs a group; `over` pairs written values with dying operands."""
    numbers = {value: number for number, value in enumerate(group.reads)}
    used = {value for op in group.ops for value in op.reads}.union(group.writes)
    calls = []
    for op in group.ops:
        local = functools.partial(_numbered, numbers)
        if op.target is aten.unbind.int:
            for part, call in _selected(op, used, local):
                calls.append(call)
                numbers[part] = len(numbers)
            continue
        calls.append(
            KernelCall(
                target=op.target,
                args=map_refs(op.args, local),
                kwargs=tuple((name, map_refs(argument, local)) for name, argument in sorted(op.kwargs.items())),
                results=tuple(value is not None for value in op.writes),
                returns_tuple=op.returns_tuple,
            )
        )
        for value in op.writes:
            if value is not None:
                numbers[value] = len(numbers)
    return Kernel(
        operands=tuple(_operand(graph, value) for value in group.reads),
        calls=tuple(calls),
        outputs=tuple(numbers[value] for value in group.writes),
        shapes=tuple(graph.values[value].shape for value in group.writes),
        layouts=tuple(graph.values[value].stride for value in group.writes),
        over=tuple((group.writes.index(written), numbers[operand]) for written, operand in over),
    )


def _selected(op: Op, used: set[int], local: Callable[[int], Ref]) -> Iterator[tuple[int, KernelCall]]:
    """A call for each used part of a tensor that is taken apart along a dimension. Taking all parts would make kernels
    differ by their number, and those for two of them (time steps) by which one they read."""
    base, *dim = map_refs(op.args, local)
    for place, value in enumerate(op.writes):
        if value in used and value is not None:
            args = (base, op.kwargs.get("dim", dim[0] if dim else 0), place)
            yield value, KernelCall(aten.select.int, args, kwargs=(), results=(True,), returns_tuple=False)


def _numbered(numbers: dict[int, int], value: int) -> Ref:
    return Ref(numbers[value])


def _operand(graph: Graph, number: int) -> Operand:
    value = graph.values[number]
    assert value.dtype is not None
    assert value.storage is not None
    device = graph.storages[value.storage].device
    aligned = device == "cpu" or value.offset * value.dtype.itemsize % ALIGNMENT == 0
    return Operand(value.shape, value.stride, value.dtype, device, aligned)


def each_result(call: KernelCall, results: Any) -> Iterator[Any]:
    """The tensors among a call's results, in the order in which `Ref`s count them."""
    given = results if call.returns_tuple else (results,)
    return (result for result, is_tensor in zip(given, call.results, strict=True) if is_tensor)
