"""Runs of cheap operators become kernels: what lives only inside one is never allocated.

A pass over the stream. Between two operators that cannot be fused (a matrix product, a draw, a collective) lies a run
of cheap ones; its connected parts become kernels, in eager's order. Views are free: a view of an operand that begins
where the operand begins moves into the kernel, one that begins elsewhere is taken outside (its offset, which differs
from time step to time step, must not make kernels differ), and a view of a result is taken again outside where
it is read there.

A draw or a load that reads nothing of the run steps in front of it, and an encoder or a store, whose result is not
read before backward, waits until it is over; nothing else changes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from encore.graph import Graph, Op, OpClass
from encore.graph.ops import is_codec, is_fusible
from encore.graph.tier_ops import LoadFrom, StoreTo
from encore.graph.values import is_contiguous
from encore.schedule.actions import Action, Fused, Run, Schedule
from encore.schedule.kernel import Group, is_describable
from encore.schedule.order import free_at_last_use

MOST_OPERANDS = 8
"""A kernel with more operands than this (a `cat` of all time steps) gains nothing from being one."""


Item = Op | Group
Refused = Callable[[Fused], bool]


def fuse(schedule: Schedule, refused: Refused = lambda action: False) -> Schedule:
    """The same step with its runs of cheap operators fused; what is `refused` stays separate operators."""
    return Fusion(schedule).without(refused)


class Fusion:
    """A step with its runs of cheap operators fused, once for all that may be refused of it."""

    def __init__(self, schedule: Schedule) -> None:
        graph = self.graph = schedule.graph
        outputs = {value for value in graph.outputs if value is not None}
        gradients = {value for value in graph.gradients if value is not None}
        constants, self.saved = set(graph.constants), schedule.saved
        self.forward = _Phase(graph, schedule.forward, graph.primals, outputs | set(self.saved) | constants)
        self.backward = _Phase(graph, schedule.backward, (*self.saved, *graph.tangents), gradients | constants)

    def without(self, refused: Refused) -> Schedule:
        """What is `refused` stays separate operators."""
        return Schedule(self.graph, self.forward.without(refused), self.backward.without(refused), self.saved)


class _Phase:
    def __init__(self, graph: Graph, actions: Sequence[Action], given: Sequence[int], keep: set[int]) -> None:
        self.graph = graph
        self.given = given
        self.keep = keep
        ops = [graph.ops[action.op] for action in actions if isinstance(action, Run)]
        self.items = _Grouping(graph, ops, keep).items()
        self.stream = self._streamed(self.items)
        """With everything fused."""

    def without(self, refused: Refused) -> tuple[Action, ...]:
        items, stream = self.items, self.stream
        while turned_down := {action.ops for action in stream if isinstance(action, Fused) and refused(action)}:
            items = _split(items, turned_down)
            stream = self._streamed(items)
        return stream

    def _streamed(self, items: Sequence[Item]) -> tuple[Action, ...]:
        return free_at_last_use(self.graph, items, self.given, self.keep)


def _split(items: Iterable[Item], turned_down: set[tuple[int, ...]]) -> list[Item]:
    """The items with some groups taken apart again; a view that a group had to itself may be there already."""
    apart: list[Item] = []
    made: set[int] = set()
    for item in items:
        refused = isinstance(item, Group) and tuple(op.id for op in item.ops) in turned_down
        for part in item.ops if isinstance(item, Group) and refused else (item,):
            written = {value for value in part.writes if value is not None}
            if not written or not written <= made:
                apart.append(part)
            made |= written
    return apart


def _copies_one_tensor(graph: Graph, op: Op) -> bool:
    """Inductor would answer with the very buffer it was given."""
    return len(op.reads) == 1


def _wants_a_sparse_gradient(graph: Graph, op: Op) -> bool:
    """Inductor would leave it to PyTorch."""
    return len(op.args) > EMBEDDING_SPARSE and bool(op.args[EMBEDDING_SPARSE])


def _mixes_types(graph: Graph, op: Op) -> bool:
    """PyTorch keeps the statistics of a bfloat16 tensor in the float32 of its weights, and asks for them in backward;
    Inductor would round them."""
    kinds = {graph.values[value].dtype for value in (*op.reads, *op.writes) if value is not None}
    return len({kind for kind in kinds if kind is not None and kind.is_floating_point}) > 1


EMBEDDING_SPARSE = 4
DECLINED: Mapping[str, Callable[[Graph, Op], bool]] = {
    "cat": _copies_one_tensor,
    "stack": _copies_one_tensor,
    "embedding": _wants_a_sparse_gradient,
    "native_layer_norm": _mixes_types,
    "native_layer_norm_backward": _mixes_types,
    "native_group_norm": _mixes_types,
    "native_group_norm_backward": _mixes_types,
    "_native_batch_norm_legit_functional": _mixes_types,
    "_native_batch_norm_legit_no_training": _mixes_types,
    "native_batch_norm_backward": _mixes_types,
    "_fused_rms_norm": _mixes_types,
    "_fused_rms_norm_backward": _mixes_types,
}
"""Forms in which an operator that could be fused stays separate."""


class _Grouping:
    """Cuts the operators of one phase into runs, and the runs into groups."""

    def __init__(self, graph: Graph, ops: Sequence[Op], keep: set[int]) -> None:
        self.graph = graph
        self.ops = ops
        self.keep = keep
        self.readers: dict[int, list[int]] = {}
        for op in ops:
            for value in op.reads:
                self.readers.setdefault(value, []).append(op.id)
        self.untold = _untold_layouts(graph)
        self.out: list[Item] = []

    def items(self) -> list[Item]:
        run: list[Op] = []
        late: list[Op] = []
        made: set[int] = set()
        for op in self.ops:
            if (op.kind is OpClass.VIEW and len(op.reads) == 1) or self._fits(op):
                run.append(op)
                made.update(value for value in op.writes if value is not None)
            elif self._goes_ahead(op) and not made.intersection(op.reads):
                self.out.append(op)
            elif run and (isinstance(op.target, StoreTo) or self._is_unread_code(op)):
                late.append(op)
            else:
                self._close(run)
                self.out += (*late, op)
                run, late, made = [], [], set()
        self._close(run)
        self.out += late
        return self.out

    def _goes_ahead(self, op: Op) -> bool:
        return op.kind is OpClass.RANDOM or isinstance(op.target, LoadFrom)

    def _is_unread_code(self, op: Op) -> bool:
        """Return whether it is an encoder whose code nothing reads here but the store that follows it."""
        readers = {reader for value in op.writes if value is not None for reader in self.readers.get(value, ())}
        return is_codec(op.target) and all(isinstance(self.graph.ops[reader].target, StoreTo) for reader in readers)

    def _fits(self, op: Op) -> bool:
        """Return whether this operator can be part of a kernel."""
        if not is_fusible(op.target) or len(op.reads) > MOST_OPERANDS:
            return False
        values = [self.graph.values[value] for value in (*op.reads, *op.writes) if value is not None]
        plain = all(
            value.storage is not None
            and value.storage not in self.untold
            and value.dtype is not None
            and not value.dtype.is_complex
            for value in values
        )
        declined = DECLINED.get(op.target.overloadpacket.__name__)
        if declined is not None and declined(self.graph, op):
            return False
        return plain and is_describable((op.args, list(op.kwargs.values()))) and all(0 not in v.shape for v in values)

    # -- one run -----------------------------------------------------------------------------------------------------

    def _close(self, run: Sequence[Op]) -> None:
        """Emit a run: views of what was there before, kernels, views of what the kernels leave."""
        parts = _connected(run)
        fused = {op.id for part in parts if len(part) > 1 for op in part}
        made = {value for op in run if op.kind is not OpClass.VIEW for value in op.writes if value is not None}
        inside, before, after = self._place_views(run, made, fused)
        self.out += before
        for part in parts:
            self.out.append(part[0] if len(part) == 1 else self._group(run, part, inside, after))
        self.out += after

    def _place_views(
        self, run: Sequence[Op], made: set[int], fused: set[int]
    ) -> tuple[dict[int, Op], list[Op], list[Op]]:
        """Views that kernels take for themselves, by what they return; views to take before the kernels; after them."""
        views = [op for op in run if op.kind is OpClass.VIEW]
        of_results: set[int] = set(made)
        for view in views:
            if of_results.intersection(view.reads):
                of_results.update(value for value in view.writes if value is not None)
        in_run = {op.id for op in run}
        inside: dict[int, Op] = {}
        outside: set[int] = set()
        for view in reversed(views):
            results = [value for value in view.writes if value is not None]
            readers = {reader for value in results for reader in self.readers.get(value, ())}
            needed = any(value in self.keep for value in results) or any(
                reader in outside or reader not in in_run or (reader not in fused and not self._is_view(reader))
                for reader in readers
            )
            of_result = bool(of_results.intersection(view.reads))
            if needed or not (of_result or self._begins_with_its_base(view)):
                outside.add(view.id)
            if of_result or view.id not in outside:
                inside.update(dict.fromkeys(results, view))
        before = [view for view in views if view.id in outside and not of_results.intersection(view.reads)]
        after = [view for view in views if view.id in outside and of_results.intersection(view.reads)]
        return inside, before, after

    def _is_view(self, op: int) -> bool:
        return self.graph.ops[op].kind is OpClass.VIEW

    def _begins_with_its_base(self, view: Op) -> bool:
        base = self.graph.values[view.reads[0]]
        return all(value is not None and self.graph.values[value].offset == base.offset for value in view.writes)

    def _group(self, run: Sequence[Op], part: Sequence[Op], inside: Mapping[int, Op], after: Sequence[Op]) -> Group:
        members = {op.id: op for op in part}
        pending = [value for op in part for value in op.reads]
        while pending:
            view = inside.get(pending.pop())
            if view is not None and view.id not in members:
                members[view.id] = view
                pending += view.reads
        ops = tuple(op for op in run if op.id in members)
        written = {value for op in ops for value in op.writes if value is not None}
        taken_after = {value for view in after for value in view.reads}
        accounted = {op.id for op in run if op.kind is OpClass.VIEW} | set(members)
        return Group(
            ops=ops,
            reads=tuple(dict.fromkeys(value for op in ops for value in op.reads if value not in written)),
            writes=tuple(
                value
                for op in part
                for value in op.writes
                if value is not None
                and (
                    value in self.keep
                    or value in taken_after
                    or any(reader not in accounted for reader in self.readers.get(value, ()))
                )
            ),
        )


def _untold_layouts(graph: Graph) -> set[int | None]:
    """Storages whose layout is not known for sure: a draw's, or an unknown operator's, that are not simply contiguous.
    Fake kernels of such operators are known to give other strides than the real ones."""
    return {
        graph.values[value].storage
        for op in graph.ops
        if op.kind in (OpClass.RANDOM, OpClass.OPAQUE)
        for value in op.writes
        if value is not None and not is_contiguous(graph.values[value])
    }


def _connected(run: Sequence[Op]) -> list[list[Op]]:
    """The operators of a run that pass values to each other, directly or through views."""
    leader: dict[int, int] = {}
    maker: dict[int, int] = {}

    def find(op: int) -> int:
        while leader[op] != op:
            leader[op] = leader[leader[op]]
            op = leader[op]
        return op

    for op in run:
        if op.kind is OpClass.VIEW:
            source = maker.get(op.reads[0])
            if source is not None:
                maker.update({value: source for value in op.writes if value is not None})
            continue
        leader[op.id] = op.id
        for value in op.reads:
            if value in maker:
                leader[find(maker[value])] = find(op.id)
        maker.update({value: op.id for value in op.writes if value is not None})
    parts: dict[int, list[Op]] = {}
    for op in run:
        if op.kind is not OpClass.VIEW:
            parts.setdefault(find(op.id), []).append(op)
    return list(parts.values())
