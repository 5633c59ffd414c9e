"""The graph of a step that carries out fates: where backward needs a value, it recomputes, decodes or loads it.

Recomputation is written down as operators of backward: copies of forward's that read what forward kept, or each other.
A copy waits for no tangent, so `schedule/order.py` runs it right before its first reader; its memory is freed after its
last. Other fates add operators of their own: to forward, after the last reader of a value there, and to backward, where
a copy would be. Every other pass, the simulator and the replayer see plain operators.

One copy is not always enough. A cheap value that is read again much later is copied again: keeping it would cost memory
to save a few microseconds. The result of a heavy operator, or of a load, is kept until its last reader.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from encore.devices import KINDS, kind_of
from encore.fates import Fate, owners
from encore.fates.fate import Shape
from encore.fates.normalised import FROM_STATISTICS, Normalised, is_training_batch_norm
from encore.fates.recompute import device_of, results_of_copy
from encore.graph import Graph, Op, OpClass, Value
from encore.graph.editor import Editor
from encore.graph.ops import class_of_call, is_fusible
from encore.graph.random_ops import DrawAgain, DrawState
from encore.graph.tier_ops import is_transfer
from encore.graph.values import Ref, block_bytes, contiguous_strides, map_refs, refs
from encore.schedule.order import order_backward

aten = torch.ops.aten
PATIENCE = 4
"""Operators that cannot be fused which may pass before a cheap copy is freed and recomputed."""
PATIENCE_WITHOUT_KERNELS = 1
"""Operators of any kind which may pass before that in the eager lowering, where a copy never melts into its reader."""


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """A step in which no value is kept that has another fate."""

    graph: Graph
    ops: Mapping[int, list[Op]]
    """By value: the operators that keep it in another form and restore it."""


def carry_out(graph: Graph, fates: Collection[Fate], *, exact: bool) -> Graph:
    """The graph that carries out these fates. `exact` asks for exactly the bits that forward made; otherwise a
    normalisation is recomputed from its statistics, which saves the reductions."""
    return carry_out_fates(graph, fates, exact=exact).graph


def carry_out_fates(graph: Graph, fates: Collection[Fate], *, exact: bool) -> CarriedOut:
    """The graph that carries out these fates, and the operators that are there for each."""
    in_place: dict[type[Fate], list[Fate]] = {}
    for fate in fates:
        if fate.in_place:
            in_place.setdefault(type(fate), []).append(fate)
    for kind, changed in in_place.items():
        graph = kind.change_operators(graph, changed)
    restored = {fate.value: fate for fate in fates if not fate.in_place}
    return _Copies(graph, restored, exact).run() if restored else CarriedOut(graph, {})


class _Copies:
    def __init__(self, graph: Graph, fates: Mapping[int, Fate], exact: bool) -> None:
        self.graph = graph
        self.fates = fates
        self.exact = exact
        self.patience = PATIENCE_WITHOUT_KERNELS if exact else PATIENCE
        self.editor = Editor(graph)
        self.values = self.editor.graph.values
        self.before: dict[int, list[Op]] = {}
        self.after: dict[int, list[Op]] = {}
        """What forward runs besides, by the operator it runs before or after."""
        self.backward: list[Op] = []
        self.owner = owners(graph, forward_only=True)
        self.copies: dict[int, int] = {}
        self.used: dict[int, int] = {}
        """When each copy was last read, by the number of barriers passed."""
        self.barriers = 0
        self.again: dict[str, int] = {}
        self.states: dict[int, int] = {}
        self.made: dict[Fate, int] = {}
        self.added: dict[int, list[Op]] = {}

    def run(self) -> CarriedOut:
        order, _ = order_backward(self.graph)
        placed = set()
        for op in order:
            if op.forward:  # a view, which its readers take again
                continue
            placed.add(op.id)
            reads = {value: self._current(value) for value in op.reads}
            self.backward.append(_reading(op, reads))
            self._move_views(op, reads)
            if is_barrier(op, exact=self.exact):
                self.barriers += 1
        for value in self.graph.gradients:
            assert value is None or value not in self.fates, "a gradient must be kept"
        self.backward += [op for op in self.graph.ops if not op.forward and op.id not in placed]
        return self._in_order()

    def _in_order(self) -> CarriedOut:
        forward = [
            one
            for op in self.graph.ops
            if op.forward
            for one in (*self.before.get(op.id, ()), op, *self.after.get(op.id, ()))
        ]
        ops = [*forward, *self.backward]
        graph = self.editor.finish_in_order(ops)
        added = {id(op): value for value, found in self.added.items() for op in found}
        ops_of: dict[int, list[Op]] = {}
        for op, placed in zip(ops, graph.ops, strict=True):
            if id(op) in added:
                ops_of.setdefault(added[id(op)], []).append(placed)
        return CarriedOut(graph, ops_of)

    def _move_views(self, op: Op, reads: dict[int, int]) -> None:
        """What backward looks at through views of its own is in the copy's memory, no longer in the original's."""
        for value in op.writes:
            for read, current in reads.items():
                storage, now = self.graph.values[read].storage, self.values[current].storage
                if value is not None and now is not None and self.graph.values[value].storage == storage:
                    self.editor.file_under(value, now)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _current(self, value: int) -> int:
        """What stands for a forward value at this point of backward: itself where it is kept, else a copy."""
        pending = [value]
        while pending:
            wanted = pending[-1]
            if self._standing(wanted) is not None:
                pending.pop()
                continue
            producer = self.graph.producer(wanted)
            assert producer is not None
            missing = [read for read in self._inputs(producer, wanted) if self._standing(read) is None]
            if missing:
                pending += missing
            else:
                self._copy(producer, wanted)
        found = self._standing(value)
        assert found is not None
        return found

    def _standing(self, value: int) -> int | None:
        owner = self.owner.get(value)
        fate = None if owner is None else self.fates.get(owner)
        if owner is None or fate is None:
            return value
        if value not in self.copies:
            return None
        once = self._maker(owner).kind is OpClass.HEAVY if fate.runs_again else fate.restored_once
        if not once and self.barriers - self.used[value] > self.patience:
            del self.copies[value]
            return None
        self.used[value] = self.barriers
        return self.copies[value]

    def _inputs(self, op: Op, wanted: int) -> tuple[int, ...]:
        fate = self.fates.get(wanted)
        if fate is not None and not fate.runs_again:
            return ()
        form = self._form(op, wanted)
        return op.reads if form is None else form.reads

    def _form(self, op: Op, wanted: int) -> Normalised | None:
        """How to take a normalisation again from its statistics, if those are kept."""
        if self.exact or op.writes[0] != wanted:
            return None
        describe = FROM_STATISTICS.get(op.target)
        form = None if describe is None else describe(self.graph, op)
        statistics = () if form is None else (form.mean, form.scale)
        return None if any(value in self.fates for value in statistics) else form

    def _copy(self, op: Op, wanted: int) -> None:
        fate = self.fates.get(wanted)
        if fate is not None and not fate.runs_again:
            self._record({wanted: fate.restore(self)})
            return
        form = self._form(op, wanted)
        if form is not None:
            self._record({wanted: self._normalise_again(op, wanted, form)})
            return
        reads = {value: self._current(value) for value in op.reads}
        target, args, kwargs = op.target, _swap(op.args, reads), _swap(op.kwargs, reads)
        if op.kind is OpClass.RANDOM:
            target, args = DrawAgain(op.target, device_of(self.graph, op)), (Ref(self._state(op)), *args)
        elif is_training_batch_norm(op):  # running statistics are not read in training, and have moved on
            target, args = aten._native_batch_norm_legit.no_stats, (*args[:3], *args[5:])
        copy = self._emit(op, target, args, kwargs)
        results = results_of_copy(op)
        made = {}
        storages: dict[int, int] = {}
        for value in results:
            made[value] = None if value is None else self._like(copy, value, storages, reads)
        copy.writes = tuple(made[value] for value in results)
        self._record({value: new for value, new in made.items() if value is not None and new is not None})

    def _record(self, made: dict[int, int]) -> None:
        for value, new in made.items():
            self.copies[value] = new
            self.used[value] = self.barriers

    def _emit(self, like: Op, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        random = like.kind is OpClass.RANDOM
        op = dataclasses.replace(
            like,
            name=self._name(like.name),
            target=target,
            args=args,
            kwargs=kwargs,
            reads=tuple(dict.fromkeys(refs((args, kwargs)))),
            kind=OpClass.CHEAP if random else _kind(target, args, kwargs),
            forward=False,
            traced_in_forward=False,
            again=True,
        )
        self.backward.append(op)
        return op

    def _name(self, name: str, how: str = "again") -> str:
        name = f"{name}_{how}"
        times = self.again[name] = self.again.get(name, 0) + 1
        return name if times == 1 else f"{name}_{times}"

    def _like(self, op: Op, original: int, storages: dict[int, int], reads: dict[int, int]) -> int:
        """A value like another one: in memory of its own, or in that of the operand it is a view of."""
        value = self.graph.values[original]
        storage = None
        if value.storage is not None:
            for read, current in reads.items():
                if self.graph.values[read].storage == value.storage:
                    storages[value.storage] = self.values[current].storage  # type: ignore[assignment]
            if value.storage not in storages:
                storages[value.storage] = self._new_storage(value.storage)
            storage = storages[value.storage]
        return self.editor.add(dataclasses.replace(value, name=self._name(value.name), storage=storage, role=None))

    def _new_storage(self, like: int) -> int:
        known = self.editor.graph.storages[like]
        return self.editor.add_storage(known.bytes, known.device)

    # -- draws -------------------------------------------------------------------------------------------------------

    def _state(self, op: Op) -> int:
        """The state of the generator before a draw: a value that forward makes and keeps."""
        if op.id not in self.states:
            device = device_of(self.graph, op)
            size = KINDS[kind_of(device)].state_bytes
            storage = self.editor.add_storage(block_bytes(size, "cpu"), "cpu")
            number = self.editor.add(Value(0, f"{op.name}_state", storage, (size,), (1,), torch.uint8, size, None))
            before = dataclasses.replace(
                op,
                id=-1,
                name=f"{op.name}_state",
                target=DrawState(device, op.kwargs.get("generator")),
                args=(),
                kwargs={},
                reads=(),
                writes=(number,),
                returns_tuple=False,
            )
            self.before.setdefault(op.id, []).append(before)
            self.states[op.id] = number
        return self.states[op.id]

    # -- what fates add ----------------------------------------------------------------------------------------------

    def once(self, fate: Fate, make: Callable[[], int]) -> int:
        """The value that `make` adds, at the first call for this fate; afterwards the same value."""
        if fate not in self.made:
            self.made[fate] = make()
        return self.made[fate]

    def in_forward(
        self, value: int, name: str, target: Any, args: tuple[Any, ...], shape: Shape, dtype: torch.dtype, device: str
    ) -> int:
        """Add an operator to forward, after the last reader of `value` there; return its contiguous result."""
        size, stride = math.prod(shape) * dtype.itemsize, contiguous_strides(shape)
        storage = self.editor.add_storage(block_bytes(size, device), device)
        made = self.editor.add(Value(0, name, storage, shape, stride, dtype, size, None))
        op = dataclasses.replace(
            self._maker(value),
            id=-1,
            name=name,
            target=target,
            args=args,
            kwargs={},
            reads=tuple(dict.fromkeys(refs(args))),
            writes=(made,),
            returns_tuple=False,
            kind=_kind(target, args, {}),
        )
        self.after.setdefault(self.last_read[value], []).append(op)
        self.added.setdefault(value, []).append(op)
        return made

    def in_backward(self, value: int, how: str, target: Any, args: tuple[Any, ...], like: int) -> int:
        """Add an operator to backward, on behalf of `value`; return its result, of the shape and layout of another
        value. `how` ends its name."""
        known = self.values[like]
        assert known.storage is not None
        op = self._emit(self._maker(value), target, args, {})
        op.name, op.returns_tuple = self._name(known.name, how), False
        storage = self._new_storage(known.storage)
        made = self.editor.add(dataclasses.replace(known, name=self._name(known.name), storage=storage, role=None))
        op.writes = (made,)
        self.added.setdefault(value, []).append(op)
        return made

    def _maker(self, value: int) -> Op:
        maker = self.graph.producer(value)
        assert maker is not None
        return maker

    @functools.cached_property
    def last_read(self) -> dict[int, int]:
        """The last operator of forward that reads a value or a view of it, else the one that makes it."""
        last: dict[int, int] = {}
        for op in self.graph.ops:
            if op.forward:
                for value in (*op.writes, *op.reads):
                    if value is not None:
                        last[self.owner.get(value, value)] = op.id
        return last

    # -- normalisations ----------------------------------------------------------------------------------------------

    def _normalise_again(self, op: Op, wanted: int, form: Normalised) -> int:
        """`(x - mean) * scale * weight + bias`, in the shapes that broadcast."""
        result = self._arithmetic(
            op, wanted, aten.sub.Tensor, self._current(form.source), self._wide(op, form.mean, form.statistics)
        )
        result = self._arithmetic(op, wanted, aten.mul.Tensor, result, self._wide(op, form.scale, form.statistics))
        if form.weight is not None:
            result = self._arithmetic(op, wanted, aten.mul.Tensor, result, self._wide(op, form.weight, form.affine))
        if form.bias is not None:
            result = self._arithmetic(op, wanted, aten.add.Tensor, result, self._wide(op, form.bias, form.affine))
        return result

    def _wide(self, op: Op, value: int, shape: tuple[int, ...]) -> int:
        """A contiguous vector in a shape that broadcasts."""
        current = self._current(value)
        known = self.values[current]
        if known.shape == shape:
            return current
        view = self._emit(op, aten.view.default, (Ref(current), list(shape)), {})
        view.returns_tuple = False
        name, stride = self._name(f"{known.name}_wide"), contiguous_strides(shape)
        made = self.editor.add(dataclasses.replace(known, name=name, shape=shape, stride=stride, role=None))
        view.writes = (made,)
        return made

    def _arithmetic(self, op: Op, wanted: int, target: Any, left: int, right: int) -> int:
        """One step towards a value: of its shape and layout, in memory of its own."""
        step = self._emit(op, target, (Ref(left), Ref(right)), {})
        step.returns_tuple = False
        like = self.graph.values[wanted]
        assert like.storage is not None
        storage = self._new_storage(like.storage)
        made = self.editor.add(dataclasses.replace(like, name=self._name(like.name), storage=storage, role=None))
        step.writes = (made,)
        return made


def is_barrier(op: Op, *, exact: bool) -> bool:
    """Return whether time passes while it runs, as copies count it: not in a view, a constant, or, where there are
    kernels, in what becomes part of one."""
    return op.kind is not OpClass.VIEW and bool(op.reads) and (exact or not is_fusible(op.target))


def _kind(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpClass:
    return OpClass.CHEAP if is_transfer(target) else class_of_call(target, args, kwargs)


def _reading(op: Op, reads: dict[int, int]) -> Op:
    """The operator with other operands."""
    if all(old == new for old, new in reads.items()):
        return op
    args, kwargs = _swap(op.args, reads), _swap(op.kwargs, reads)
    return dataclasses.replace(op, args=args, kwargs=kwargs, reads=tuple(dict.fromkeys(refs((args, kwargs)))))


def _swap(argument: Any, reads: dict[int, int]) -> Any:
    return map_refs(argument, lambda value: Ref(reads[value]))
