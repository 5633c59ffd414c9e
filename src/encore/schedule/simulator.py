"""The memory of a schedule, byte by byte: storages alive after every action, by kind, and the worst moment.

A storage is alive while a name of it is kept by any of these: the schedule, the user (outputs), autograd
(tangents for the whole of backward, gradients from then on). Parameters, buffers and inputs were alive before the step
and are not part of its peak. On CPU this matches the allocator to the byte.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from encore.graph import Graph, Op, Role
from encore.schedule.actions import Action, Free, Fused, Run, Schedule, Wait

Workspace = Callable[[Graph, Op | Fused], int]
"""Bytes that an operator or kernel allocates and gives back while it runs."""


class Kind(enum.Enum):
    """What a live byte is there for."""

    PARAMETER = "parameter"
    INPUT = "input"
    GRADIENT = "gradient"
    FEATURE_MAP = "feature map"
    RECOMPUTED = "recomputed"
    OUTPUT = "output"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"


INDEX = {kind: index for index, kind in enumerate(Kind)}


class Moment(NamedTuple):
    """The state right after one action, and the most that was alive while it ran."""

    phase: str
    action: Action | None
    live: int
    peak: int
    by_kind: tuple[int, ...]
    """Live bytes in the order of `Kind`."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step. Bytes are those the step allocates; what was there before is in `resident`."""

    moments: tuple[Moment, ...]
    resident: int
    saved: int
    """Bytes alive between forward and backward."""
    worst: int
    """Position of the worst moment."""
    outputs_outlive: bool
    """Whether the user is assumed to keep the outputs until the end."""

    @property
    def workspace_at_worst(self) -> int:
        return self.moments[self.worst].peak - self.moments[self.worst].live

    @property
    def step_peak(self) -> int:
        return self.moments[self.worst].peak


@dataclass(frozen=True, slots=True)
class Change:
    """Memory that came (`bytes` above 0), went (below 0), or was taken over by another value (0), on the way to a
    moment."""

    moment: int
    storage: int | None
    """None for memory of the caller that is no value of the graph."""
    bytes: int
    kind: Kind
    value: int | None = None
    """The value that takes the memory over."""


def simulate(
    schedule: Schedule, workspace: Workspace = lambda graph, op: 0, *, outputs_outlive: bool = True
) -> Timeline:
    """Walk the schedule, forward then backward. The user is assumed to keep the outputs until the end, unless they
    only go on to the next graph of a broken model (`outputs_outlive=False`), which is done with them by then."""
    walk = _Walk(schedule, workspace)
    saved = _walk_step(walk, schedule, outputs_outlive)
    return Timeline(
        moments=tuple(walk.moments),
        resident=walk.resident,
        saved=saved,
        worst=max(range(len(walk.moments)), key=lambda position: walk.moments[position].peak),
        outputs_outlive=outputs_outlive,
    )


def alive_at_worst(schedule: Schedule, timeline: Timeline) -> tuple[int, ...]:
    """Values alive at the worst moment of a simulated schedule, one a storage, largest first."""
    walk = _Walk(schedule, lambda graph, op: 0, stop_at=timeline.worst)
    with contextlib.suppress(_Reached):
        _walk_step(walk, schedule, timeline.outputs_outlive)
    return walk.alive()


def changes(schedule: Schedule, timeline: Timeline, *, first: bool = True) -> list[Change]:
    """Every storage that comes and goes in a simulated schedule, in order; workspaces are in the timeline's moments.
    A graph that is not the `first` of its step hands the gradients of its inputs on after the last moment."""
    noted: list[Change] = []
    walk = _Walk(schedule, lambda graph, op: 0, changes=noted)
    _walk_step(walk, schedule, timeline.outputs_outlive)
    if not first:
        walk.hand_on_gradients()
    return noted


def _walk_step(walk: _Walk, schedule: Schedule, outputs_outlive: bool) -> int:
    """The whole step; returns the bytes alive between forward and backward."""
    graph = schedule.graph
    walk.phase("forward", schedule.forward, given=graph.primals)
    walk.keep(graph.returned)
    walk.release_names(keep=schedule.saved)
    walk.note("between", None, 0)
    saved = walk.live
    if not outputs_outlive:
        walk.release(graph.returned)
    walk.keep(value for value in graph.tangents if value not in graph.copied_tangents)
    walk.charge(sum(graph.values[value].bytes for value in graph.copied_tangents), Kind.GRADIENT)
    walk.phase("backward", schedule.backward, given=(*schedule.saved, *graph.tangents))
    walk.hold_gradients()
    return saved


class _Reached(Exception):  # noqa: N818 - not an error: the walk has come as far as it was asked to
    pass


class _Walk:
    def __init__(
        self,
        schedule: Schedule,
        workspace: Workspace,
        stop_at: int | None = None,
        changes: list[Change] | None = None,
    ) -> None:
        self.stop_at = stop_at
        self.changes = changes
        self.graph = schedule.graph
        self.workspace = workspace
        self.external = self.graph.external
        self.storage_of = [value.storage for value in self.graph.values]
        self.bytes_of = [storage.bytes for storage in self.graph.storages]
        self.kind_of = _kinds(schedule)
        self.looks = [0] * len(self.bytes_of)
        self.names: dict[int, None] = {}
        self.by_kind = [0] * len(Kind)
        self.live = 0
        self.resident = self._count_resident()
        self.moments: list[Moment] = []

    def phase(self, name: str, actions: Sequence[Action], given: Iterable[int]) -> None:
        for value in given:
            self._bind(value)
        for action in actions:
            if isinstance(action, Free):
                self._unbind(action.value)
                self.note(name, action, 0)
            elif isinstance(action, Fused):
                for written, operand in action.over:
                    self._take_over(operand, written)
                for written in action.writes:
                    self._bind(written)
                self.note(name, action, self.workspace(self.graph, action))
            elif isinstance(action, Wait):  # what was stored is freed by name, what is loaded has its memory
                self.note(name, action, 0)
            else:
                op = self.graph.ops[action.op]
                if isinstance(action, Run) and action.over is not None:
                    result = op.writes[0]
                    assert result is not None
                    self._take_over(action.over, result)
                for made in op.writes:
                    if made is not None:
                        self._bind(made)
                self.note(name, action, self.workspace(self.graph, op))

    def note(self, phase: str, action: Action | None, workspace: int) -> None:
        self.moments.append(Moment(phase, action, self.live, self.live + workspace, tuple(self.by_kind)))
        if self.stop_at == len(self.moments) - 1:
            raise _Reached

    def keep(self, values: Iterable[int]) -> None:
        """The caller or autograd keeps these from now on."""
        for value in values:
            self._look(self.storage_of[value])

    def charge(self, size: int, kind: Kind) -> None:
        """Count memory of the caller that is no value of the graph."""
        self.live += size
        self.by_kind[INDEX[kind]] += size
        if size:
            self._change(None, size, INDEX[kind])

    def release(self, values: Iterable[int]) -> None:
        """The caller or autograd no longer keeps these."""
        for value in values:
            self._look_away(self.storage_of[value])

    def release_names(self, keep: Iterable[int]) -> None:
        """Forward returns: its frame is freed, what it saves stays."""
        kept = set(keep)
        for value in [value for value in self.names if value not in kept]:
            self._unbind(value)

    def hold_gradients(self) -> None:
        """Backward returns. A gradient that PyTorch cannot take as it is (returned twice, memory of the caller's, or
        laid out differently from its parameter) is copied, one after the other. Views of one storage are taken."""
        theirs = {storage for value in self.graph.tangents if (storage := self.storage_of[value]) is not None}
        theirs |= self.external
        seen: set[int] = set()
        storages: set[int] = set()
        for primal, value in self.graph.with_gradients():
            if value is None or (storage := self.storage_of[value]) is None:
                continue
            copied = value in seen or storage in theirs or not _same_layout(self.graph, primal, value)
            if copied and primal in self.graph.leaves:
                self.charge(self.graph.values[primal].bytes, Kind.GRADIENT)
                self.note("end", None, 0)
                if storage not in storages | theirs:
                    self._unbind(value)
            seen.add(value)
            storages.add(storage)
        self.note("end", None, 0)

    def hand_on_gradients(self) -> None:
        """Gradients of inputs are the tangents of the graph before, which counts them as its own."""
        for primal, value in self.graph.with_gradients():
            if value is not None and self.graph.values[primal].role is not Role.PARAMETER:
                self._unbind(value)

    def alive(self) -> tuple[int, ...]:
        """One value for every storage alive now, largest storage first: the one made last where several look at it."""
        latest = {storage: value for value in self.names if (storage := self.storage_of[value]) is not None}
        for value, storage in enumerate(self.storage_of):
            if storage is not None and self.looks[storage]:
                latest.setdefault(storage, value)
        ours = [storage for storage in latest if storage not in self.external]
        ours.sort(key=lambda storage: -self.graph.storages[storage].bytes)
        return tuple(latest[storage] for storage in ours)

    # -- names and storages ------------------------------------------------------------------------------------------

    def _bind(self, value: int) -> None:
        if value not in self.names:
            self.names[value] = None
            self._look(self.storage_of[value])

    def _unbind(self, value: int) -> None:
        if value in self.names:
            del self.names[value]
            self._look_away(self.storage_of[value])

    def _take_over(self, operand: int, result: int) -> None:
        """The result and its later views live in the operand's storage."""
        old, new = self.storage_of[result], self.storage_of[operand]
        assert old is not None
        assert new is not None
        for value in self.graph.storages[old].values:
            self.storage_of[value] = new
        if self.kind_of[old] != self.kind_of[new]:
            self._change_kind(new, self.kind_of[old])
        self._change(new, 0, self.kind_of[new], result)

    def _change_kind(self, storage: int, kind: int) -> None:
        size = self.bytes_of[storage]
        self.by_kind[self.kind_of[storage]] -= size
        self.by_kind[kind] += size
        self.kind_of[storage] = kind

    def _look(self, storage: int | None) -> None:
        if storage is None:
            return
        self.looks[storage] += 1
        if self.looks[storage] == 1 and storage not in self.external:
            self._add(storage, self.bytes_of[storage])

    def _look_away(self, storage: int | None) -> None:
        if storage is None:
            return
        self.looks[storage] -= 1
        if self.looks[storage] == 0 and storage not in self.external:
            self._add(storage, -self.bytes_of[storage])

    def _add(self, storage: int, size: int) -> None:
        self.live += size
        self.by_kind[self.kind_of[storage]] += size
        if size:
            self._change(storage, size, self.kind_of[storage])

    def _change(self, storage: int | None, size: int, kind: int, value: int | None = None) -> None:
        if self.changes is not None:
            self.changes.append(Change(len(self.moments), storage, size, tuple(Kind)[kind], value))

    def _count_resident(self) -> int:
        for storage in self.external:
            self.by_kind[self.kind_of[storage]] += self.bytes_of[storage]
        return sum(self.bytes_of[storage] for storage in self.external)


def _kinds(schedule: Schedule) -> list[int]:
    """What each storage is there for, as a number; the last description that fits."""
    graph = schedule.graph
    kinds = [INDEX[Kind.TEMPORARY]] * len(graph.storages)

    def mark(values: Iterable[int | None], kind: Kind) -> None:
        for value in values:
            if value is not None and (storage := graph.values[value].storage) is not None:
                kinds[storage] = INDEX[kind]

    mark((value for op in graph.ops if op.again for value in op.writes), Kind.RECOMPUTED)
    mark(graph.outputs, Kind.OUTPUT)
    mark(schedule.saved, Kind.FEATURE_MAP)
    mark((*graph.gradients, *graph.tangents), Kind.GRADIENT)
    mark((*graph.primals, *graph.constants), Kind.INPUT)
    owned = (Role.PARAMETER, Role.BUFFER)
    mark((value for value in graph.primals if graph.values[value].role in owned), Kind.PARAMETER)
    return kinds


def _same_layout(graph: Graph, primal: int, gradient: int) -> bool:
    """Return whether autograd would take this gradient without a copy."""
    parameter, value = graph.values[primal], graph.values[gradient]
    strides = zip(parameter.shape, parameter.stride, value.stride, strict=True)
    return parameter.shape == value.shape and all(size == 1 or mine == its for size, mine, its in strides)
