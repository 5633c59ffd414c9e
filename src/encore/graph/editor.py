"""Changing a graph: a copy that operators can be added to, taken from and moved in, and that puts itself in order."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from encore.errors import IllegalGraphError
from encore.graph import Graph, Op, OpClass, Storage, Value
from encore.graph.on_shapes import windows
from encore.graph.ops import SIDE_EFFECTS, class_of_call, classify
from encore.graph.values import Ref, block_bytes, contiguous_strides, map_refs, refs
from encore.graph.verify import STORAGE_OFFSET

AS_STRIDED = torch.ops.aten.as_strided.default


class Editor:
    """A graph under change. Values keep their numbers; operators are put in order and renumbered by `finish`.

    The copy is made when `graph` is first asked for: a pass that finds nothing to change makes none.
    """

    def __init__(self, graph: Graph) -> None:
        self.original = graph
        self._place: dict[int, tuple[float, int]] = {}
        self._removed: set[int] = set()
        self.changed = False

    @functools.cached_property
    def graph(self) -> Graph:
        graph = self.original
        return dataclasses.replace(
            graph,
            values=[value.copy(value.readers) for value in graph.values],
            storages=[storage.copy() for storage in graph.storages],
            ops=[op.copy(op.id) for op in graph.ops],
            outputs=list(graph.outputs),
            gradients=list(graph.gradients),
            returned=list(graph.returned),
        )

    def op_after(
        self, neighbour: Op, name: str, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None
    ) -> Op:
        """A new operator that wants to run right after another one, in its phase and on its behalf."""
        op = Op(
            id=len(self.graph.ops),
            name=name,
            target=target,
            args=tuple(args),
            kwargs=kwargs or {},
            reads=tuple(dict.fromkeys(refs((tuple(args), kwargs or {})))),
            writes=(),
            returns_tuple=False,
            kind=class_of_call(target, args, kwargs or {}),
            module=neighbour.module,
            source=neighbour.source,
            traced_in_forward=neighbour.traced_in_forward,
            forward=neighbour.forward,
        )
        self.graph.ops.append(op)
        self._place[op.id] = (self.place_of(neighbour)[0], op.id)
        self.changed = True
        return op

    def op_before(
        self, neighbour: Op, name: str, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None
    ) -> Op:
        """A new operator that wants to run right before another one."""
        op = self.op_after(neighbour, name, target, args, kwargs)
        place, _ = self.place_of(neighbour)
        self._place[op.id] = (place - 0.5, op.id)
        return op

    def place_after(self, op: Op, others: Iterable[Op]) -> None:
        """Have an operator of the graph run right after the last of some others."""
        self._place[op.id] = (max(self.place_of(other)[0] for other in others), op.id)
        self.changed = True

    def place_of(self, op: Op) -> tuple[float, int]:
        return self._place.get(op.id, (float(op.id), -1))

    def result(self, op: Op, shape: Sequence[int], dtype: torch.dtype, device: str) -> int:
        """A new contiguous tensor that the operator makes."""
        storage = self.add_storage(block_bytes(math.prod(shape) * dtype.itemsize, device), device)
        return self._add_value(op, op.name, storage, tuple(shape), contiguous_strides(shape), dtype, 0)

    def add_storage(self, size: int, device: str) -> int:
        """Add memory of so many bytes."""
        self.graph.storages.append(Storage(len(self.graph.storages), size, device))
        return len(self.graph.storages) - 1

    def add(self, value: Value) -> int:
        """Add a value, in the storage it names, and return its number."""
        value.id, value.readers = len(self.graph.values), []
        self.graph.values.append(value)
        if value.storage is not None:
            self.graph.storages[value.storage].values.append(value.id)
        return value.id

    def view_result(self, op: Op, base: int, shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
        """A new view that the operator takes of `base`, `offset` elements into it."""
        source = self.graph.values[base]
        assert source.storage is not None
        assert source.dtype is not None
        name = f"{op.name}.{len(op.writes)}"
        return self._add_value(
            op, name, source.storage, tuple(shape), tuple(stride), source.dtype, source.offset + offset
        )

    def adopt(self, op: Op, value: int) -> None:
        """Let the operator make a value that another one made until now."""
        previous = self.graph.producer(value)
        if previous is not None:
            self.remove(previous)
        self.graph.values[value].producer = op.id
        op.writes = (*op.writes, value)

    def move_into(self, value: int, base: int, offset: int) -> None:
        """Let a value that had memory of its own, with all its views, live `offset` elements into another one."""
        old, new = self.graph.values[value].storage, self.graph.values[base].storage
        assert old is not None
        assert new is not None
        moved = self.graph.storages[old].values
        for number in moved:
            self.graph.values[number].storage = new
            self.graph.values[number].offset += offset
            self._shift_places(number, offset)
        self.graph.storages[new].values += moved
        self.graph.storages[old].values = []

    def _shift_places(self, value: int, offset: int) -> None:
        """`as_strided` may name a place in the storage: it is `offset` elements further on now."""
        for reader in self.graph.values[value].readers:
            op = self.graph.ops[reader]
            if op.target is not AS_STRIDED or value not in op.reads:
                continue
            if len(op.args) > STORAGE_OFFSET and op.args[STORAGE_OFFSET] is not None:
                op.args = (*op.args[:STORAGE_OFFSET], op.args[STORAGE_OFFSET] + offset)
            elif op.kwargs.get("storage_offset") is not None:
                op.kwargs = {**op.kwargs, "storage_offset": op.kwargs["storage_offset"] + offset}

    def viewed(self, after: Op, number: int, shape: Sequence[int]) -> Ref:
        """A value in another shape, which its strides must allow."""
        value = self.graph.values[number]
        if value.shape == tuple(shape):
            return Ref(number)
        strides = view_strides(value, shape)
        assert strides is not None, "a value that was found to fit cannot be viewed"
        name = f"{value.name}_{math.prod(shape[:-1])}_rows"
        op = self.op_after(after, name, torch.ops.aten.view.default, (Ref(number), list(shape)))
        return Ref(self.view_result(op, number, shape, strides, 0))

    def become(self, op: Op, value: int, made: int) -> None:
        """Have a value of the graph be a view of what an operator made."""
        shape, name = list(self.graph.values[value].shape), self.graph.values[value].name
        view = self.op_after(op, f"{name}_of_{op.name}", torch.ops.aten.view.default, (Ref(made), shape))
        self.move_into(value, made, 0)
        self.adopt(view, value)

    def file_under(self, value: int, storage: int) -> None:
        """Record that a value is in another storage than it was until now."""
        was = self.graph.values[value].storage
        if was != storage:
            if was is not None:
                self.graph.storages[was].values.remove(value)
            self.graph.storages[storage].values.append(value)
            self.graph.values[value].storage = storage

    def remove(self, op: Op) -> None:
        self._removed.add(op.id)
        self.changed = True

    def read_instead(self, op: Op, old: int, new: int) -> None:
        """Have an operator read another value in place of one. A view moves with what it reads: see `finish`."""
        op = self.graph.ops[op.id]
        op.args = map_refs(op.args, lambda value: Ref(new if value == old else value))
        op.kwargs = map_refs(op.kwargs, lambda value: Ref(new if value == old else value))
        op.reads = tuple(dict.fromkeys(refs((op.args, op.kwargs))))
        self.changed = True

    def make_instead(self, op: Op, target: Any, dtype: torch.dtype) -> None:
        """Have an operator, where it is, call something that makes its only result in another type."""
        op = self.graph.ops[op.id]
        (number,) = op.writes
        assert number is not None
        value = self.graph.values[number]
        assert value.storage is not None
        storage = self.graph.storages[value.storage]
        op.target, op.kind = target, classify(target)
        value.dtype, value.bytes = dtype, math.prod(value.shape) * dtype.itemsize
        storage.bytes = block_bytes(value.bytes, storage.device)
        self.changed = True

    def call_with(self, op: Op, args: tuple[Any, ...]) -> None:
        """Have an operator, where it is, be called with other arguments that are not values."""
        self.graph.ops[op.id].args = args
        self.changed = True

    def resize(self, number: int, shape: Sequence[int]) -> None:
        """Record that a value with memory of its own has another shape, and is contiguous."""
        value = self.graph.values[number]
        assert value.storage is not None
        assert value.dtype is not None
        storage = self.graph.storages[value.storage]
        value.shape, value.stride = tuple(shape), contiguous_strides(shape)
        value.bytes = math.prod(shape) * value.dtype.itemsize
        storage.bytes = block_bytes(value.bytes, storage.device)
        self.changed = True

    def finish_in_place(self) -> Graph:
        """The graph with every operator where it was: for changes that neither add, remove nor connect any."""
        return self.graph if self.changed else self.original

    def finish(self) -> Graph:
        """The graph in order: as it was, as far as operators that wait for others allow. The original if unchanged."""
        if not self.changed:
            return self.original
        graph = self.graph
        kept = [op for op in graph.ops if op.id not in self._removed]
        self._settle_orphans(kept)
        graph.ops[:] = self._ordered(self._alive(kept))
        self._move_views()
        return self._numbered()

    def finish_in_order(self, ops: Iterable[Op]) -> Graph:
        """The graph with copies of these operators, old and new ones, in this order."""
        self.graph.ops[:] = [op.copy(number) for number, op in enumerate(ops)]
        return self._numbered()

    def _numbered(self) -> Graph:
        """The graph with its operators numbered in their order, by which values know their producer and readers."""
        graph = self.graph
        for value in graph.values:
            value.readers, value.producer = [], None
        for number, op in enumerate(graph.ops):
            op.id = number
            for written in op.writes:
                if written is not None:
                    graph.values[written].producer = number
            for read in op.reads:
                graph.values[read].readers.append(number)
        return graph

    # -- views ---------------------------------------------------------------------------------------------------------

    def _move_views(self) -> None:
        """A view whose operand is another value now, or has moved, is in the storage of that operand, and so are the
        views of it: in order, each finds its operand settled."""
        for op in self.graph.ops:
            if op.kind is not OpClass.VIEW or len(op.reads) != 1:
                continue
            base = self.graph.values[op.reads[0]]
            if base.storage is None:
                continue
            if any(made is not None and self.graph.values[made].storage != base.storage for made in op.writes):
                self._move_view(op, base)

    def _move_view(self, op: Op, base: Value) -> None:
        assert base.storage is not None
        for number, seen in zip(op.writes, windows(op, base, self.graph.storages[base.storage].bytes), strict=True):
            if number is None:
                continue
            value = self.graph.values[number]
            if tuple(seen.shape) != value.shape or tuple(seen.stride()) != value.stride or seen.dtype != value.dtype:
                raise IllegalGraphError(
                    f"illegal graph: a rewrite lays out {value.name} with strides {tuple(seen.stride())}, and its "
                    f"readers were planned for {value.stride}"
                )
            self.file_under(number, base.storage)
            value.offset = int(seen.storage_offset())

    # -- order -------------------------------------------------------------------------------------------------------

    def _alive(self, ops: Sequence[Op]) -> list[Op]:
        """The operators whose results are needed."""
        needed = {value for value in (*self.graph.outputs, *self.graph.gradients) if value is not None}
        alive = []
        for op in self._ordered(ops)[::-1]:
            if op.kind in SIDE_EFFECTS or any(value in needed for value in op.writes):
                alive.append(op)
                needed.update(op.reads)
            else:
                self._orphan(value for value in op.writes if value is not None)
        return alive[::-1]

    def _settle_orphans(self, kept: Sequence[Op]) -> None:
        """Values whose operator is gone and that no operator makes any more leave their storages."""
        made = {value for op in kept for value in op.writes if value is not None}
        self._orphan(value.id for value in self.graph.values if value.producer is not None and value.id not in made)

    def _orphan(self, values: Iterable[int]) -> None:
        for number in values:
            value = self.graph.values[number]
            if value.storage is not None:
                self.graph.storages[value.storage].values.remove(number)
            value.storage = value.producer = None

    def _ordered(self, ops: Sequence[Op]) -> list[Op]:
        """Sorted by place, except that no operator runs before what it reads; side effects keep their order."""
        by_id = {op.id: op for op in ops}
        maker = {value: op.id for op in ops for value in op.writes if value is not None}
        waits_for = {op.id: {maker[value] for value in op.reads if value in maker} for op in ops}
        effects = [op.id for op in ops if op.kind in SIDE_EFFECTS]
        for before, after in itertools.pairwise(effects):
            waits_for[after].add(before)
        readers: dict[int, list[int]] = {}
        for number, sources in waits_for.items():
            for source in sources:
                readers.setdefault(source, []).append(number)
        missing = {number: len(sources) for number, sources in waits_for.items()}
        ready = [(*self.place_of(op), op.id) for op in ops if not missing[op.id]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            *_, number = heapq.heappop(ready)
            ordered.append(by_id[number])
            for reader in readers.get(number, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (*self.place_of(by_id[reader]), reader))
        assert len(ordered) == len(ops), "a rewrite made operators wait for each other"
        return ordered

    def _add_value(
        self,
        op: Op,
        name: str,
        storage: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        offset: int,
    ) -> int:
        size = math.prod(shape) * dtype.itemsize
        number = self.add(Value(0, name, storage, shape, stride, dtype, size, op.id, offset=offset))
        op.writes = (*op.writes, number)
        return number


def view_strides(value: Value, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a value under another shape; None where only a copy could have it."""
    try:
        return torch.empty_strided(value.shape, value.stride, device="meta").view(tuple(shape)).stride()
    except (RuntimeError, ValueError):  # the latter while tracing
        return None
