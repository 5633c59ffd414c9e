"""The graph of one training step as Encore sees it: operators, the values they pass, the storages behind them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from encore.devices import KINDS, kind_of
from encore.graph.ops import OpClass


class Role(enum.Enum):
    """What an input of the graph is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    TANGENT = "tangent"


@dataclass(frozen=True, slots=True)
class Ref:
    """A value in the arguments of an operator."""

    value: int


@dataclass(slots=True)
class Storage:
    """Memory of one or more values. It is alive while one of them is."""

    id: int
    bytes: int
    device: str
    values: list[int] = field(default_factory=list)

    def copy(self) -> Storage:
        return Storage(self.id, self.bytes, self.device, list(self.values))


@dataclass(slots=True)
class Value:
    """A tensor of the step, known by shape only; or a non-tensor result (`storage` is None)."""

    id: int
    name: str
    storage: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype | None
    bytes: int
    producer: int | None
    role: Role | None = None
    offset: int = 0
    """Elements between the beginning of the storage and the first of its own."""
    readers: list[int] = field(default_factory=list)
    """Operators that read it, in graph order."""

    def copy(self, readers: Sequence[int] = ()) -> Value:
        """The same value in another graph, where others read it. (`dataclasses.replace` takes five times as long, and
        a pass copies every value.)"""
        return Value(
            self.id,
            self.name,
            self.storage,
            self.shape,
            self.stride,
            self.dtype,
            self.bytes,
            self.producer,
            self.role,
            self.offset,
            list(readers),
        )


@dataclass(slots=True)
class Op:
    """One operator call. `args` and `kwargs` are PyTorch's own, with `Ref` where a value stands."""

    id: int
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int | None, ...]
    """Results by position; None where the operator returns no tensor."""
    returns_tuple: bool
    kind: OpClass
    module: str
    source: str
    traced_in_forward: bool = True
    """Whether eager's forward runs it."""
    forward: bool = False
    """Whether the planned forward runs it; otherwise backward does."""
    again: bool = False
    """Whether it is a copy of a forward operator, which recomputes a value in backward."""

    def copy(self, number: int) -> Op:
        """The same operator at a position of another graph."""
        return Op(
            number,
            self.name,
            self.target,
            self.args,
            self.kwargs,
            self.reads,
            self.writes,
            self.returns_tuple,
            self.kind,
            self.module,
            self.source,
            self.traced_in_forward,
            self.forward,
            self.again,
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Graph:
    """Forward and backward of one step. `primals` and `tangents` come in, `outputs` and `gradients` go out."""

    values: list[Value]
    storages: list[Storage]
    ops: list[Op]
    primals: list[int]
    tangents: list[int]
    outputs: list[int | None]
    """By position; None where the step returns something that is not a tensor: see `literals`."""
    gradients: list[int | None]
    """One for every primal but tokens; None where it needs none."""
    constants: dict[int, Any] = field(default_factory=dict)
    """Tensors and modules that are constants of the graph, by value."""
    literals: dict[int, Any] = field(default_factory=dict)
    """Numbers among the outputs, by position: sizes that were symbols while tracing."""
    identities: list[int | None] = field(default_factory=list)
    """For every primal that is a parameter or buffer, which one: graphs of one model share them."""
    copied_tangents: set[int] = field(default_factory=set)
    """Tangents of outputs that are strided views: the user's gradient is copied into the view's strides first."""
    leaves: set[int] = field(default_factory=set)
    """Primals whose gradient autograd collects in a `.grad`, copying it where it is shared or laid out otherwise."""
    mutated: set[int] = field(default_factory=set)
    """Primals whose contents the step replaces: what backward reads of them is not what forward read."""
    returned: list[int] = field(default_factory=list)
    """Outputs that the caller gets; the others are new contents of mutated inputs, which are copied and freed."""

    @property
    def external(self) -> set[int]:
        """Storages that are alive before the step and after it."""
        owners = [*self.primals, *self.constants]
        return {storage for value in owners if (storage := self.values[value].storage) is not None}

    def with_gradients(self) -> Iterator[tuple[int, int | None]]:
        """Every primal with its gradient. Tokens, which keep operators with effects in order, come first and have
        none."""
        tokens = max(0, len(self.primals) - len(self.gradients))
        return zip(self.primals[tokens:], self.gradients, strict=False)

    def bytes_of(self, value: int) -> int:
        storage = self.values[value].storage
        return 0 if storage is None else self.storages[storage].bytes

    def producer(self, value: int) -> Op | None:
        producer = self.values[value].producer
        return None if producer is None else self.ops[producer]


def block_bytes(size: int, device: str) -> int:
    """The bytes that the allocator of a device returns for `size` bytes."""
    block = KINDS[kind].block if (kind := kind_of(device)) in KINDS else 1
    return -(-size // block) * block


def span_bytes(value: Value) -> int:
    """Bytes from a value's first element to its last: more than its own if it skips some, less if they overlap."""
    if value.dtype is None or 0 in value.shape:
        return 0
    if len(value.stride) != len(value.shape):
        return value.bytes
    return span_elements(value.shape, value.stride) * value.dtype.itemsize


def span_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first to the last one of a strided view."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_contiguous(value: Value) -> bool:
    """Return whether its elements are contiguous in memory, the last dimension fastest. A sparse tensor's are not."""
    if len(value.stride) != len(value.shape):
        return False
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def refs(argument: Any) -> Iterator[int]:
    """Every value in an argument."""
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, tuple | list):
        for item in argument:
            yield from refs(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from refs(item)
    elif isinstance(argument, slice):
        yield from refs((argument.start, argument.stop, argument.step))


def map_refs(argument: Any, replace: Callable[[int], Any]) -> Any:
    """The argument with every `Ref` replaced."""
    if isinstance(argument, Ref):
        return replace(argument.value)
    if isinstance(argument, tuple | list):
        return type(argument)(map_refs(item, replace) for item in argument)
    if isinstance(argument, dict):
        return {key: map_refs(item, replace) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(map_refs(part, replace) for part in (argument.start, argument.stop, argument.step)))
    return argument
