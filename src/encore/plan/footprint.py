"""What of a device a plan takes: the bytes that its allocator reserves while steps run with it.

A GPU runs out of reserved bytes, not of allocated ones. So the events of a plan (`schedule/allocator_events.py`) go
through a model of the allocator (`devices/caching_allocator.py`), which begins with what is there
(`devices/reserved.py`). The training loop around the step is the usual one: a new batch each step, the optimizer's
state from the first step on, and gradients that are set to None, before the new batch is there or after. Several steps
are followed, until they reserve nothing more.

Known shortcomings: those of the allocator's model; shapes that are planned apart are not followed one after the other;
and what plain code allocates around the graphs is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from encore.devices import CachingAllocator, DeviceBlock, DeviceMemory
from encore.graph import Graph, Role
from encore.plan.plan import Plan
from encore.schedule import Kind, MemoryEvent, What, memory_events, residents
from encore.schedule.allocator_events import Traces

MOST_STEPS = 6
SCALARS = 8
"""Bytes of the scalars that an optimizer keeps for each parameter at most; they are on the host."""
STEADY = 2
"""Steps that reserve nothing more, after which no later one is expected to."""


@dataclass(frozen=True, slots=True)
class Resident:
    """What a step's training keeps on a device, besides what is there already."""

    inputs: tuple[tuple[int, int], ...]
    """Bytes of each input, and the address of the one that is there now."""
    parameters: tuple[int, ...]
    """Bytes of each parameter that has a gradient."""
    state: int
    """Bytes of the optimizer's state that are not there yet."""
    absent: tuple[int, ...] = ()
    """Bytes of each parameter and buffer that is not there yet."""


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """A device as a plan finds it, and how much of it there is."""

    memory: DeviceMemory
    limit: int
    """Bytes that may be reserved."""
    resident: Resident
    traces: Traces | None = None
    """What operators ask of the allocator."""

    def reserved(self, plans: Sequence[Plan]) -> int:
        """The most bytes that are reserved while steps run with these plans."""
        return max(_TrainingLoop(self, plans, batch_first=one).run() for one in (False, True))


@dataclass(frozen=True, slots=True)
class ReservedFootprint:
    """The reserved bytes of plans on each device of a step."""

    rooms: tuple[DeviceRoom, ...]
    known: dict[tuple[int, ...], tuple[Sequence[Plan], Mapping[str, int]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """What plans reserve, by their `id`."""

    @property
    def limit(self) -> int:
        """The bound on `__call__`."""
        return max(room.limit for room in self.rooms)

    @property
    def limits(self) -> Mapping[str, int]:
        """The bound of each device."""
        return {room.memory.device: room.limit for room in self.rooms}

    def by_device(self, plans: Sequence[Plan]) -> Mapping[str, int]:
        """The reserved bytes of each device."""
        key = tuple(map(id, plans))
        if key not in self.known:
            self.known[key] = plans, {room.memory.device: room.reserved(plans) for room in self.rooms}
        return self.known[key][1]

    def alone(self) -> ReservedFootprint:
        """The same without the plans that were looked at."""
        return ReservedFootprint(self.rooms)

    def __call__(self, plans: Sequence[Plan]) -> int:
        """The reserved bytes of the device that comes closest to its limit, or exceeds it most, as if all devices had
        the largest limit."""
        limit, found = self.limit, self.by_device(plans)
        return max(found[room.memory.device] + limit - room.limit for room in self.rooms)


class _TrainingLoop:
    """A training loop on one device."""

    def __init__(self, room: DeviceRoom, plans: Sequence[Plan], *, batch_first: bool) -> None:
        self._room, self._batch_first = room, batch_first
        self._device = room.memory.device
        self._allocator = CachingAllocator.restored(room.memory.segments)
        schedules, timelines = [plan.schedule for plan in plans], [plan.timeline for plan in plans]
        events = memory_events(schedules, timelines, room.traces)
        self._events = [event for event in events if event.device in (self._device, "")]
        self._alive: dict[object, tuple[Kind, DeviceBlock | None]] = {}
        self._outputs: list[DeviceBlock | None] = []
        """Those of the step before, which the loop keeps until it has new ones."""
        for size in room.resident.absent:
            self._allocator.allocate(size)
        self._inputs = [self._allocator.block_at(address) for _, address in room.resident.inputs]
        if room.resident.absent:
            self._new_batch()
        self._gradients: list[DeviceBlock | None] = []
        self._multiplied: set[object] = set()

    def run(self) -> int:
        steady = 0
        for number in range(MOST_STEPS):
            before = self._allocator.peak_reserved
            self._step(number)
            steady = steady + 1 if number and self._allocator.peak_reserved == before else 0
            if steady == STEADY:
                break
        return self._allocator.peak_reserved

    def _step(self, number: int) -> None:
        if number and self._batch_first:
            self._new_batch()
        for block in self._gradients:
            self._allocator.free(block)
        if number and not self._batch_first:
            self._new_batch()
        for event in self._events:
            self._follow(event)
        left, self._alive = self._alive, {}
        self._gradients = [block for kind, block in left.values() if kind is not Kind.OUTPUT]
        self._outputs = [block for kind, block in left.values() if kind is Kind.OUTPUT]
        self._optimize(first=number == 0)

    def _new_batch(self) -> None:
        made = [self._allocator.allocate(size) for size, _ in self._room.resident.inputs]
        for block in self._inputs:
            self._allocator.free(block)
        self._inputs = made

    def _follow(self, event: MemoryEvent) -> None:
        allocator = self._allocator
        match event.what:
            case What.ALLOCATE:
                self._alive[event.key] = event.kind, allocator.allocate(event.bytes)
            case What.FREE:
                allocator.free(self._alive.pop(event.key)[1])
            case What.USE:
                allocator.use(event.bytes)
            case What.MULTIPLY if event.key not in self._multiplied:
                self._multiplied.add(event.key)
                allocator.allocate(self._room.memory.product_workspace)
            case What.FORWARD_ENDS:
                for block in self._outputs:
                    allocator.free(block)
                self._outputs = []

    def _optimize(self, *, first: bool) -> None:
        """The optimizer's state comes once, in tensors like the parameters; its temporary tensors, one a parameter,
        each step."""
        parameters, left = self._room.resident.parameters, self._room.resident.state
        if not left:
            return
        if first:
            copies = round(left / max(1, sum(parameters)))
            for size in parameters:
                for _ in range(copies):
                    self._allocator.allocate(size)
            rest = left - copies * sum(parameters)
            self._allocator.allocate(rest if rest > SCALARS * len(parameters) else 0)
        temporary = [self._allocator.allocate(size) for size in parameters]
        for block in temporary:
            self._allocator.free(block)


def resident_on(
    device: str, graphs: Sequence[Graph], addresses: Mapping[int, int], state: int, *, there: bool
) -> Resident:
    """What training keeps on a device: `addresses` are those of the first graph's inputs, by value; `state` the bytes
    of the optimizer on all devices; `there` says whether the model is on its devices already."""
    inputs, parameters, absent = list[tuple[int, int]](), list[int](), list[int]()
    everywhere = 0
    for index, value, kind in residents(graphs):
        graph = graphs[index]
        storage = graph.values[value].storage
        assert storage is not None
        size, here = graph.storages[storage].bytes, graph.storages[storage].device == device
        if kind is Kind.INPUT and here:
            inputs.append((size, addresses.get(value, 0)))
        elif kind is Kind.PARAMETER:
            absent += [size] if here and not there else []
            if graph.values[value].role is Role.PARAMETER:
                everywhere += graph.values[value].bytes
                parameters += [graph.values[value].bytes] if here else []
    on_device = state * sum(parameters) // everywhere if everywhere else state
    return Resident(tuple(inputs), tuple(parameters), on_device, tuple(absent))
