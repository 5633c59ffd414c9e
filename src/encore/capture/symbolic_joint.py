"""A joint graph with symbols in place of sizes, and the joint graph of each size.

Dynamo traces dimensions that differ between batches with symbols where the code allows it, and guards on what the trace
assumes of them. Then one trace serves all lengths: the joint graph of a size is the same operators with a number in
place of every expression, as a trace of that size would have them. What follows (rewrites, plan, schedule) sees numbers
alone.

Known shortcoming: sizes that depend on data, sparse tensors of symbolic sizes and arithmetic that Python does not have
cannot be filled in; such a graph is for the traced sizes only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from encore.capture import torch_private
from encore.capture.unused_outputs import lean_copy
from encore.graph.torch_private import pytree

Number = Callable[[tuple[Any, ...]], Any]
"""Takes the numbers of a size, and returns one of them, or a constant."""


class UnsizedError(Exception):
    """A graph with symbols that stand for more than sizes of its inputs."""


@dataclass(frozen=True, slots=True)
class _SizedTensor:
    """A traced tensor with symbols in its layout."""

    like: torch.Tensor
    storage: int
    """By `_cdata` of the traced storage."""
    bytes: Number
    offset: Number
    shape: tuple[Number, ...]
    stride: tuple[Number, ...]

    def at(self, numbers: tuple[Any, ...], storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if self.storage not in storages:
            storages[self.storage] = torch.UntypedStorage(self.bytes(numbers), device="meta")
        shape, stride = (tuple(one(numbers) for one in many) for many in (self.shape, self.stride))
        look = (self.offset(numbers), shape, stride, self.like.dtype, self.like.device)
        return torch_private.fake_window(self.like.fake_mode, storages[self.storage], *look)  # type: ignore[attr-defined]


class SymbolicJoint:
    """The joint graph of all sizes."""

    def __init__(self, joint: fx.GraphModule) -> None:
        self._joint = torch_private.graph_in_place_of(joint, lean_copy(joint.graph))
        self._sources = _symbol_sources(joint.graph)
        self._symbols = tuple(self._sources)
        self.traced = tuple(source.traced for source in self._sources.values())
        """The values of the symbols in the trace."""
        self._readers = [(source.place, source.read) for source in self._sources.values()]
        self._expressions: dict[Any, int] = {}
        self._hints: list[Any] = []
        self._symbolic_storages = frozenset(self._storages_with_symbols())
        self._vals = {node: self._template(node.meta["val"]) for node in self._joint.graph.nodes if "val" in node.meta}
        self._args = {
            node: (self._template(node.args), self._template(node.kwargs))
            for node in self._joint.graph.nodes
            if any(isinstance(leaf, torch_private.SYMBOLIC_NUMBERS) for leaf in _leaves(node))
        }
        try:
            self._numbers = torch_private.formula(self._symbols, tuple(self._expressions))
            known = self._numbers(*self.traced)
        except Exception as error:  # of any kind: the printed arithmetic runs
            raise UnsizedError(f"its sizes cannot be computed: {error}") from None
        if list(known) != self._hints:
            raise UnsizedError("its sizes are not what their expressions give")

    def sizes_of(self, primals: Sequence[Any]) -> tuple[int, ...]:
        """The values of the symbols in a call."""
        return tuple([read(primals[place]) for place, read in self._readers])

    def at(self, sizes: Sequence[int]) -> fx.GraphModule:
        """The joint graph of these sizes."""
        numbers = self._numbers(*sizes)
        storages: dict[int, torch.UntypedStorage] = {}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}

        def filled(template: Any) -> Any:
            if isinstance(template, _SizedTensor):
                return template.at(numbers, storages)
            if isinstance(template, _Expression):
                return numbers[template.number]
            if type(template) is tuple or type(template) is list:
                return type(template)(filled(one) for one in template)
            return {key: filled(one) for key, one in template.items()} if type(template) is dict else template

        with torch_private.real_tensors():
            for node in self._joint.graph.nodes:
                copy = copies[node] = graph.node_copy(node, copies.__getitem__)
                if node in self._args:
                    copy.args, copy.kwargs = fx.map_arg(filled(self._args[node]), copies.__getitem__)
                copy.meta = dict(node.meta)
                if node in self._vals:
                    copy.meta["val"] = filled(self._vals[node])
        return torch_private.graph_in_place_of(self._joint, graph)

    # -- the symbols of a trace --------------------------------------------------------------------------------------

    def _storages_with_symbols(self) -> Iterator[int]:
        for node in self._joint.graph.nodes:
            for val in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(val, torch.Tensor) and _is_symbolic(val):
                    if not torch_private.is_plain_fake(val):
                        raise UnsizedError(f"{node.name} is not a dense tensor")
                    yield val.untyped_storage()._cdata

    def _template(self, thing: Any) -> Any:
        """The thing with what depends on sizes left open. Tensors without symbols stay the traced ones."""
        if isinstance(thing, torch_private.SYMBOLIC_NUMBERS):
            return self._number(thing)
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing)
        if type(thing) is dict or isinstance(thing, fx.immutable_collections.immutable_dict):
            return {key: self._template(one) for key, one in thing.items()}
        if isinstance(thing, slice):
            return slice(*(torch_private.pin(part) for part in (thing.start, thing.stop, thing.step)))
        if isinstance(thing, tuple | list):
            return (tuple if isinstance(thing, tuple) else list)(self._template(one) for one in thing)
        return thing

    def _tensor(self, tensor: torch.Tensor) -> Any:
        plain = torch_private.is_plain_fake(tensor)
        if not plain or tensor.untyped_storage()._cdata not in self._symbolic_storages:
            return tensor
        storage = tensor.untyped_storage()
        return _SizedTensor(
            tensor,
            storage._cdata,
            self._bytes(storage),
            self._getter(tensor.storage_offset()),
            tuple(map(self._getter, tensor.shape)),
            tuple(map(self._getter, tensor.stride())),
        )

    def _bytes(self, storage: torch.UntypedStorage) -> Number:
        """The bytes of a storage; those of an input that is a view are a symbol of their own."""
        for symbol, source in self._sources.items():
            if str(symbol) == _bytes_symbol(storage):
                return self._expression(symbol, source.traced).of
        return self._getter(storage.nbytes())

    def _getter(self, number: Any) -> Number:
        return self._number(number).of if isinstance(number, torch_private.SYMBOLIC_NUMBERS) else lambda _: number

    def _number(self, number: Any) -> _Expression:
        return self._expression(torch_private.expression_of(number), torch_private.hint_of(number))

    def _expression(self, expression: Any, hint: Any) -> _Expression:
        if hint is None or not expression.free_symbols.issubset(self._symbols):
            raise UnsizedError(f"{expression} depends on more than the sizes of inputs")
        if expression not in self._expressions:
            self._expressions[expression] = len(self._expressions)
            self._hints.append(hint)
        return _Expression(self._expressions[expression])


@dataclass(frozen=True, slots=True)
class _Expression:
    """One of the numbers of a size."""

    number: int

    def of(self, numbers: tuple[Any, ...]) -> Any:
        return numbers[self.number]


@dataclass(frozen=True, slots=True)
class _SymbolSource:
    """Where the value of a symbol is read."""

    place: int
    """The primal, by number."""
    read: Callable[[Any], int]
    traced: int


def _symbol_sources(joint: fx.Graph) -> dict[Any, _SymbolSource]:
    """By symbol; a primal that is the number itself comes before layouts of tensors."""
    primals = [node.meta.get("val") for node in joint.find_nodes(op="placeholder") if "tangents" not in node.name]
    found: dict[Any, _SymbolSource] = {}

    def add(place: int, number: Any, read: Callable[[Any], int]) -> None:
        if isinstance(number, torch.SymInt) and torch_private.expression_of(number).is_symbol:
            source = _SymbolSource(place, read, torch_private.hint_of(number))
            found.setdefault(torch_private.expression_of(number), source)

    for place, val in enumerate(primals):
        add(place, val, _itself)
    tensors = [(place, val) for place, val in enumerate(primals) if torch_private.is_plain_fake(val)]
    for place, val in tensors:
        for number in range(val.dim()):
            add(place, val.shape[number], functools.partial(_size, number))
            add(place, val.stride()[number], functools.partial(_stride, number))
        add(place, val.storage_offset(), _offset)
    for place, val in tensors:
        size = val.untyped_storage().nbytes()
        if isinstance(size, torch.SymInt) and not torch_private.expression_of(size).free_symbols <= found.keys():
            symbol = torch_private.new_symbol(_bytes_symbol(val.untyped_storage()))
            found.setdefault(symbol, _SymbolSource(place, _bytes_of_storage, torch_private.hint_of(size)))
    return found


def _itself(number: int) -> int:
    return number


def _size(number: int, tensor: torch.Tensor) -> int:
    return tensor.shape[number]


def _stride(number: int, tensor: torch.Tensor) -> int:
    return tensor.stride()[number]


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _bytes_of_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _bytes_symbol(storage: torch.UntypedStorage) -> str:
    return f"bytes_{storage._cdata}"


def _is_symbolic(tensor: torch.Tensor) -> bool:
    strides = (*tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    return any(isinstance(one, torch.SymInt) for one in (*tensor.shape, *strides))


def _leaves(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves((node.args, node.kwargs))
