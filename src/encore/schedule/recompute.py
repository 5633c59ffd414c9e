"""The graph of a step that does not keep some of its feature maps: backward computes them again, decodes them, or loads
them from a tier, where it needs them.

Recomputation is written down as operators of backward: copies of forward's that read what forward kept, or each other.
A copy waits for no tangent, so `schedule/order.py` runs it right before its first reader; its memory goes back after
its last. An encoded value is one more operator of forward, after its last reader there, and its copies are made by the
decoder; so is one that leaves for a tier, whose copy is made by a load. Every other pass, the simulator and the
replayer see plain operators.

One copy is not always enough. A cheap value that is read again much later is copied again: holding it would cost memory
for the sake of a few microseconds. What a heavy operator made, or a load, is held until its last reader.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch

from encore.codecs import CODECS
from encore.graph import Graph, Op, OpClass, Storage, Value
from encore.graph.ops import DRAWS_BY_SHAPE, classify, is_fusible
from encore.graph.random_ops import DrawAgain, DrawState
from encore.graph.tier_ops import TOKEN_BYTES, TOKEN_DTYPE, LoadFrom, StoreTo
from encore.graph.values import Ref, block_bytes, contiguous_strides, map_refs, refs
from encore.schedule.choice import Encoded, Offloaded
from encore.schedule.normalised import FROM_STATISTICS, Normalised, is_training_batch_norm
from encore.schedule.order import order_backward

aten = torch.ops.aten
PATIENCE = 4
"""Operators that cannot be fused which may pass before a cheap copy is let go and made again."""
PATIENCE_WITHOUT_KERNELS = 1
"""Operators of any kind which may pass before that in the eager lowering, where a copy never melts into its reader."""
RUN_AGAIN = frozenset({OpClass.CHEAP, OpClass.HEAVY, OpClass.RANDOM})
STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""The size of a generator's state, by type of device."""


def recomputable(graph: Graph) -> frozenset[int]:
    """The values that forward may let go because running their operators again would give the same.

    Writes, messages between processes and unknown operators happen once; a draw can be repeated where its generator's
    state can be kept. What the caller gets is held by the caller anyway. And an operator can only run again while its
    operands are what they were: new contents of inputs and buffers are copied over the old ones before backward runs.
    """
    changing = _changing_storages(graph)
    ours = owned(graph)
    return frozenset(
        value
        for op in graph.ops
        if op.forward and op.kind is not OpClass.VIEW and _can_run_again(graph, op, changing)
        for value in _made_again(op)
        if value in ours
    )


def owned(graph: Graph) -> frozenset[int]:
    """What forward makes in memory that is its own: of nobody outside, never written to again, of one owner."""
    leaving = {graph.values[value].storage for value in (*graph.outputs, *graph.gradients) if value is not None}
    foreign = graph.external | leaving | _changing_storages(graph) | {None}
    made = [
        value
        for op in graph.ops
        if op.forward and op.kind is not OpClass.VIEW
        for value in op.writes
        if value is not None
    ]
    owners_of = Counter(graph.values[value].storage for value in made)
    return frozenset(
        value for value in made if (storage := graph.values[value].storage) not in foreign and owners_of[storage] == 1
    )


def made_by(graph: Graph, names: Collection[str]) -> frozenset[int]:
    """What the forward operators of these names make."""
    ops = (op for op in graph.ops if op.forward and op.name in names)
    return frozenset(value for op in ops for value in op.writes if value is not None)


def _can_run_again(graph: Graph, op: Op, changing: set[int]) -> bool:
    if not isinstance(op.target, torch._ops.OpOverload):
        return False
    if op.kind is OpClass.RANDOM:
        known = _device(graph, op).partition(":")[0] in STATE_BYTES
        if not known or op.target.overloadpacket.__name__ not in DRAWS_BY_SHAPE:
            return False
    if op.kind not in RUN_AGAIN:
        return False
    statistics = op.args[3:5] if is_training_batch_norm(op) else ()
    unread = {argument.value for argument in statistics if isinstance(argument, Ref)}
    return not any(graph.values[read].storage in changing for read in op.reads if read not in unread)


def _made_again(op: Op) -> tuple[int | None, ...]:
    """What a copy of an operator makes: of BatchNorm, not the running statistics, which are counted once."""
    return op.writes[:3] if is_training_batch_norm(op) else op.writes


def _changing_storages(graph: Graph) -> set[int]:
    """Storages that do not hold in backward what they held in forward."""
    writers = (op for op in graph.ops if op.kind is OpClass.MUTATING)
    written = (*graph.mutated, *(value for op in writers for value in op.reads))
    return {storage for value in written if (storage := graph.values[value].storage) is not None}


def recompute(
    graph: Graph,
    dropped: Collection[int],
    *,
    exact: bool,
    encode: Iterable[Encoded] = (),
    offload: Iterable[Offloaded] = (),
) -> Graph:
    """The graph in which backward makes the `dropped` values again, decodes those to `encode`, and loads those to
    `offload`. `exact` asks for the very bits that forward made; otherwise a normalisation is taken again from its
    statistics, which saves the reductions."""
    codes, moved = {one.value: one for one in encode}, {one.value: one.tier for one in offload}
    return _Copier(graph, dropped, codes, moved, exact).run() if dropped or codes or moved else graph


class _Copier:
    def __init__(
        self,
        graph: Graph,
        dropped: Collection[int],
        codes: dict[int, Encoded],
        moved: dict[int, str],
        exact: bool,
    ) -> None:
        self.graph = graph
        self.codes = codes
        self.moved = moved
        """By value: the tier that it, or its code, goes to."""
        self.dropped = frozenset((*dropped, *codes, *moved))
        self.exact = exact
        self.patience = PATIENCE_WITHOUT_KERNELS if exact else PATIENCE
        self.values = [value.copy() for value in graph.values]
        self.storages = [storage.copy() for storage in graph.storages]
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
        self.made_codes: dict[int, int] = {}
        self.loaded_codes: dict[int, int] = {}

    def run(self) -> Graph:
        order, _ = order_backward(self.graph)
        placed = set()
        for op in order:
            if op.forward:  # a view, taken again by whoever needs it
                continue
            placed.add(op.id)
            reads = {value: self._current(value) for value in op.reads}
            self.backward.append(_reading(op, reads))
            self._move_views(op, reads)
            if is_barrier(op, exact=self.exact):
                self.barriers += 1
        for value in self.graph.gradients:
            assert value is None or value not in self.dropped, "a gradient cannot be dropped"
        self.backward += [op for op in self.graph.ops if not op.forward and op.id not in placed]
        return self._numbered()

    def _numbered(self) -> Graph:
        ops = []
        forward = (
            one
            for op in self.graph.ops
            if op.forward
            for one in (*self.before.get(op.id, ()), op, *self.after.get(op.id, ()))
        )
        for number, op in enumerate((*forward, *self.backward)):
            ops.append(op if op.id == number else op.copy(number))
            for written in op.writes:
                if written is not None:
                    self.values[written].producer = number
            for read in op.reads:
                self.values[read].readers.append(number)
        return dataclasses.replace(self.graph, values=self.values, storages=self.storages, ops=ops)

    def _move_views(self, op: Op, reads: dict[int, int]) -> None:
        """What backward looks at through views of its own is in the copy's memory, no longer in the original's."""
        for value in op.writes:
            for read, current in reads.items():
                storage, now = self.graph.values[read].storage, self.values[current].storage
                if value is not None and now is not None and self.graph.values[value].storage == storage != now:
                    self.storages[storage].values.remove(value)  # type: ignore[index]
                    self.storages[now].values.append(value)
                    self.values[value].storage = now

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
        if owner not in self.dropped:
            return value
        if value not in self.copies:
            return None
        maker = self.graph.producer(owner)
        assert maker is not None
        cheap = owner in self.codes or (owner not in self.moved and maker.kind is not OpClass.HEAVY)
        if cheap and self.barriers - self.used[value] > self.patience:
            del self.copies[value]
            return None
        self.used[value] = self.barriers
        return self.copies[value]

    def _inputs(self, op: Op, wanted: int) -> tuple[int, ...]:
        if wanted in self.codes or wanted in self.moved:
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
        return None if any(value in self.dropped for value in statistics) else form

    def _copy(self, op: Op, wanted: int) -> None:
        if wanted in self.codes:
            self._record({wanted: self._decode(op, wanted)})
            return
        if wanted in self.moved:
            self._record({wanted: self._load(op, wanted, self.moved[wanted], self.last_read[wanted])})
            return
        form = self._form(op, wanted)
        if form is not None:
            self._record({wanted: self._normalise_again(op, wanted, form)})
            return
        reads = {value: self._current(value) for value in op.reads}
        target, args, kwargs = op.target, _swap(op.args, reads), _swap(op.kwargs, reads)
        if op.kind is OpClass.RANDOM:
            target, args = DrawAgain(op.target, _device(self.graph, op)), (Ref(self._state(op)), *args)
        elif is_training_batch_norm(op):  # running statistics are not read in training, and have moved on
            target, args = aten._native_batch_norm_legit.no_stats, (*args[:3], *args[5:])
        copy = self._emit(op, target, args, kwargs)
        results = _made_again(op)
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
            kind=OpClass.CHEAP if random else classify(target),
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
                storages[value.storage] = self._new_storage(self.graph.storages[value.storage])
            storage = storages[value.storage]
        return self._add(dataclasses.replace(value, name=self._name(value.name), storage=storage, role=None))

    def _add(self, value: Value) -> int:
        value.id = len(self.values)
        value.readers = []
        self.values.append(value)
        if value.storage is not None:
            self.storages[value.storage].values.append(value.id)
        return value.id

    def _new_storage(self, like: Storage) -> int:
        self.storages.append(dataclasses.replace(like, id=len(self.storages), values=[]))
        return len(self.storages) - 1

    # -- draws -------------------------------------------------------------------------------------------------------

    def _state(self, op: Op) -> int:
        """The state of the generator before a draw: a value that forward makes and keeps."""
        if op.id not in self.states:
            device = _device(self.graph, op)
            size = STATE_BYTES[device.partition(":")[0]]
            self.storages.append(Storage(len(self.storages), block_bytes(size, "cpu"), "cpu"))
            state = Value(0, f"{op.name}_state", len(self.storages) - 1, (size,), (1,), torch.uint8, size, None)
            number = self._add(state)
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

    # -- codes -------------------------------------------------------------------------------------------------------

    def _decode(self, maker: Op, wanted: int) -> int:
        value = self.graph.values[wanted]
        assert value.storage is not None
        assert value.dtype is not None
        codec = CODECS[self.codes[wanted].codec]
        code = self._code(maker, wanted)
        if wanted in self.moved:
            if code not in self.loaded_codes:
                self.loaded_codes[code] = self._load(maker, code, self.moved[wanted], self.last_read[wanted])
            code = self.loaded_codes[code]
        args = codec.decode_args(Ref(code), value.shape, value.stride, value.dtype)
        decoder = self._emit(maker, codec.decode, args, {})
        decoder.name, decoder.returns_tuple = self._name(value.name, "decoded"), False
        storage = self._new_storage(self.graph.storages[value.storage])
        made = self._add(dataclasses.replace(value, name=self._name(value.name), storage=storage, role=None))
        decoder.writes = (made,)
        return made

    def _code(self, maker: Op, wanted: int) -> int:
        """The code of a value: forward makes it once nobody there reads the value any more, and keeps it."""
        if wanted not in self.made_codes:
            encoded, value = self.codes[wanted], self.graph.values[wanted]
            assert value.storage is not None
            device = self.graph.storages[value.storage].device
            self.storages.append(Storage(len(self.storages), block_bytes(encoded.bytes, device), device))
            name = f"{value.name}_{encoded.codec}"
            size = (encoded.bytes,)
            number = self._add(Value(0, name, len(self.storages) - 1, size, (1,), torch.uint8, encoded.bytes, None))
            codec = CODECS[encoded.codec]
            args = codec.encode_args(Ref(wanted))
            encoder = dataclasses.replace(
                maker,
                id=-1,
                name=name,
                target=codec.encode,
                args=args,
                kwargs={},
                reads=(wanted,),
                writes=(number,),
                returns_tuple=False,
                kind=classify(codec.encode),
            )
            self.after.setdefault(self.last_read[wanted], []).append(encoder)
            self.made_codes[wanted] = number
        return self.made_codes[wanted]

    # -- tiers -------------------------------------------------------------------------------------------------------

    def _load(self, maker: Op, wanted: int, tier: str, last_read: int) -> int:
        """A value, or a code that forward has made, from the tier that forward puts it into."""
        value = self.values[wanted]
        assert value.storage is not None
        token = self._add(
            Value(0, f"{value.name}_token", self._token_storage(), (1,), (1,), TOKEN_DTYPE, TOKEN_BYTES, None)
        )
        store = dataclasses.replace(
            maker,
            id=-1,
            name=f"{value.name}_store",
            target=StoreTo(tier),
            args=(Ref(wanted),),
            kwargs={},
            reads=(wanted,),
            writes=(token,),
            returns_tuple=False,
            kind=OpClass.CHEAP,
        )
        self.after.setdefault(last_read, []).append(store)
        load = self._emit(maker, LoadFrom(tier), (Ref(token), value.shape, value.stride, value.dtype), {})
        load.name, load.returns_tuple, load.kind = self._name(value.name, "load"), False, OpClass.CHEAP
        storage = self._new_storage(self.storages[value.storage])
        made = self._add(dataclasses.replace(value, name=self._name(value.name), storage=storage, role=None))
        load.writes = (made,)
        return made

    def _token_storage(self) -> int:
        self.storages.append(Storage(len(self.storages), TOKEN_BYTES, "cpu"))
        return len(self.storages) - 1

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
        made = self._add(dataclasses.replace(known, name=name, shape=shape, stride=stride, role=None))
        view.writes = (made,)
        return made

    def _arithmetic(self, op: Op, wanted: int, target: Any, left: int, right: int) -> int:
        """One step towards a value: of its shape and layout, in memory of its own."""
        step = self._emit(op, target, (Ref(left), Ref(right)), {})
        step.returns_tuple = False
        like = self.graph.values[wanted]
        assert like.storage is not None
        storage = self._new_storage(self.graph.storages[like.storage])
        made = self._add(dataclasses.replace(like, name=self._name(like.name), storage=storage, role=None))
        step.writes = (made,)
        return made


def is_barrier(op: Op, *, exact: bool) -> bool:
    """Does time pass while it runs, as copies count it? Not in a view, a constant, or, where there are kernels, in what
    becomes part of one."""
    return op.kind is not OpClass.VIEW and bool(op.reads) and (exact or not is_fusible(op.target))


def owners(graph: Graph, *, forward_only: bool) -> dict[int, int]:
    """For every value that is made, the value whose memory it looks at: itself, or what it is a view of."""
    owner: dict[int, int] = {}
    for op in graph.ops:
        if forward_only and not op.forward:
            continue
        bases = [owner.get(read, read) for read in op.reads] if op.kind is OpClass.VIEW else []
        for value in op.writes:
            if value is not None:
                owner[value] = bases[0] if bases else value
    return owner


def _reading(op: Op, reads: dict[int, int]) -> Op:
    """The operator with other operands."""
    if all(old == new for old, new in reads.items()):
        return op
    args, kwargs = _swap(op.args, reads), _swap(op.kwargs, reads)
    return dataclasses.replace(op, args=args, kwargs=kwargs, reads=tuple(dict.fromkeys(refs((args, kwargs)))))


def _swap(argument: Any, reads: dict[int, int]) -> Any:
    return map_refs(argument, lambda value: Ref(reads[value]))


def _device(graph: Graph, op: Op) -> str:
    (value, *_) = (value for value in op.writes if value is not None)
    storage = graph.values[value].storage
    assert storage is not None
    return graph.storages[storage].device
