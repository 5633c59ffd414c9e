"""A step as its allocator sees it: every allocation and free, in order, each on its device.

The changes of the simulated schedules, with the workspaces that operators allocate and free while they run, and the
workspaces that cuBLAS keeps from the first product of each thread on. Sums of these are the simulator's timelines, to
the byte; an allocator may follow them one by one (`plan/footprint.py`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from encore.devices import kind_of
from encore.graph import Graph, Op
from encore.rnn import WORKSPACES as RECURRENT
from encore.schedule.actions import Fused, Run, Schedule
from encore.schedule.operator_trace import OperatorTrace
from encore.schedule.simulator import Change, Kind, Timeline, changes
from encore.schedule.stacking import residents, stretches

PRODUCTS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation", "_scaled_mm",
    "_int_mm", "_grouped_mm", "linear", "linear_backward", "matmul", "matmul_backward",
})  # fmt: skip
"""Operators of PyTorch that call cuBLAS. Encore's recurrent ones may."""


class What(enum.Enum):
    """What happens to memory."""

    ALLOCATE = "allocate"
    FREE = "free"
    USE = "use"
    """Allocated and freed while one operator runs."""
    MULTIPLY = "multiply"
    """A thread needs cuBLAS's workspace from here on."""
    FORWARD_ENDS = "forward ends"


class MemoryEvent(NamedTuple):
    """One event. What is freed was allocated with the same key."""

    what: What
    device: str
    bytes: int
    key: object = None
    kind: Kind = Kind.WORKSPACE


Traces = Callable[[Graph, Op | Fused], OperatorTrace | None]
"""What an operator asks of its allocator; None if only its results and the size of its workspace are known."""


def memory_events(
    schedules: Sequence[Schedule], timelines: Sequence[Timeline], traces: Traces | None = None
) -> Iterator[MemoryEvent]:
    """The events of a step that runs these schedules: forwards in order, backwards in reverse."""
    graphs = [schedule.graph for schedule in schedules]
    by_moment = [
        _by_moment(schedule, timeline, first=index == 0)
        for index, (schedule, timeline) in enumerate(zip(schedules, timelines, strict=True))
    ]
    parts, given = stretches(graphs, timelines), set[int]()
    for number, part in enumerate(parts):
        graph, moments = graphs[part.graph], timelines[part.graph].moments
        for place in part.moments:
            came, action = by_moment[part.graph].get(place, []), moments[place].action
            trace = _trace(graph, action, traces)
            if trace is not None:
                yield from _traced(part.graph, graph, action, trace, came, forward=number < len(graphs))
                continue
            yield from _changes(part.graph, graph, came)
            yield from _products(graph, action, forward=number < len(graphs))
            size = moments[place].peak - moments[place].live
            if size:
                yield MemoryEvent(What.USE, device_of_action(graph, action), size)
        if part.moments.stop == len(moments):
            yield from _changes(part.graph, graph, by_moment[part.graph].get(len(moments), ()))
            yield from _tangents(part.graph, graph)
            yield from _added_up(part.graph, graph, given)
        if number == len(graphs) - 1:
            yield MemoryEvent(What.FORWARD_ENDS, "", 0)


def resident_bytes(graphs: Sequence[Graph]) -> dict[str, int]:
    """What is there before a step and after it, by device."""
    found: dict[str, int] = defaultdict(int)
    for index, value, _ in residents(graphs):
        storage = graphs[index].values[value].storage
        if storage is not None:
            found[graphs[index].storages[storage].device] += graphs[index].storages[storage].bytes
    return dict(found)


def device_peaks(schedules: Sequence[Schedule], timelines: Sequence[Timeline]) -> dict[str, int]:
    """The peak of the step on every device, above what is there before it. Peaks of several devices need not be at
    the same moment."""
    live: dict[str, int] = defaultdict(int)
    peaks: dict[str, int] = defaultdict(int)
    for event in memory_events(schedules, timelines):
        if event.what is What.ALLOCATE:
            live[event.device] += event.bytes
        elif event.what is What.FREE:
            live[event.device] -= event.bytes
        used = event.bytes if event.what is What.USE else 0
        peaks[event.device] = max(peaks[event.device], live[event.device] + used)
    peaks.pop("", None)
    return dict(peaks)


def devices_of(graphs: Sequence[Graph]) -> list[str]:
    """The devices that a step has memory on."""
    return sorted({storage.device for graph in graphs for storage in graph.storages if storage.bytes})


def _trace(graph: Graph, action: object, traces: Traces | None) -> OperatorTrace | None:
    if traces is None or not isinstance(action, Run | Fused):
        return None
    return traces(graph, graph.ops[action.op] if isinstance(action, Run) else action)


def _traced(
    index: int, graph: Graph, action: object, trace: OperatorTrace, came: Sequence[Change], *, forward: bool
) -> Iterator[MemoryEvent]:
    """What an operator allocates and frees, in its own order. A product asks for cuBLAS's workspace once its operands
    are there; a result for which nothing was allocated has no memory."""
    assert isinstance(action, Run | Fused)
    device = device_of_action(graph, action)
    writes = graph.ops[action.op].writes if isinstance(action, Run) else action.writes
    made = {change.storage: change for change in came if change.bytes > 0 and change.storage is not None}
    results: dict[int, int] = {}
    for value, number in zip(writes, trace.results, strict=False):
        storage = None if value is None else graph.values[value].storage
        if storage is not None and number is not None:
            results[number] = storage
        elif storage in made:
            yield from _changes(index, graph, [dataclasses.replace(made.pop(storage), bytes=0)])
    keys: list[tuple[object, int]] = []
    products = list(_products(graph, action, forward=forward))
    for event in trace.events:
        if event < 0:
            yield from products
            products = []
            key, size = keys[-1 - event]
            yield MemoryEvent(What.FREE, device, size, key)
            continue
        number = len(keys)
        keys.append((object(), event))
        if number not in results:
            yield MemoryEvent(What.ALLOCATE, device, event, keys[number][0])
        elif (change := made.pop(results[number], None)) is not None:
            yield from _changes(index, graph, [change])
    yield from products
    yield from _changes(index, graph, [change for change in came if change.bytes <= 0 or change.storage in made])


def device_of_action(graph: Graph, action: object) -> str:
    """The device that an operator or kernel runs on: the accelerator among those of its operands and results."""
    assert isinstance(action, Run | Fused)
    ops: list[Op] = [graph.ops[number] for number in ((action.op,) if isinstance(action, Run) else action.ops)]
    values = [graph.values[value] for op in ops for value in (*op.writes, *op.reads) if value is not None]
    devices = [graph.storages[value.storage].device for value in values if value.storage is not None]
    return next((device for device in devices if kind_of(device) != "cpu"), "cpu")


def _by_moment(schedule: Schedule, timeline: Timeline, *, first: bool) -> dict[int, list[Change]]:
    found: dict[int, list[Change]] = defaultdict(list)
    for change in changes(schedule, timeline, first=first):
        found[change.moment].append(change)
    return found


def _changes(index: int, graph: Graph, found: Sequence[Change]) -> Iterator[MemoryEvent]:
    for change in found:
        if change.storage is None:
            yield MemoryEvent(What.ALLOCATE, _usual_device(graph), change.bytes, object(), change.kind)
        elif change.value is None:
            what = What.ALLOCATE if change.bytes >= 0 else What.FREE
            device = graph.storages[change.storage].device
            yield MemoryEvent(what, device, abs(change.bytes), (index, change.storage), change.kind)


def _tangents(index: int, graph: Graph) -> Iterator[MemoryEvent]:
    """Backward is over, and autograd frees the gradients that it was given, unless they are results."""
    results = {graph.values[value].storage for value in graph.gradients if value is not None}
    values = [value for value in graph.tangents if value not in graph.copied_tangents]
    storages = dict.fromkeys(graph.values[value].storage for value in values)
    for storage in storages:
        if storage is not None and storage not in results and storage not in graph.external:
            size, device = graph.storages[storage].bytes, graph.storages[storage].device
            yield MemoryEvent(What.FREE, device, size, (index, storage), Kind.GRADIENT)


def _added_up(index: int, graph: Graph, given: set[int]) -> Iterator[MemoryEvent]:
    """Gradients of parameters that a backward before has given, too: autograd adds them up in its memory."""
    external = graph.external
    for place, (_, gradient) in enumerate(graph.with_gradients()):
        identity = graph.identities[place] if graph.identities else None
        if gradient is None or identity is None:
            continue
        storage = graph.values[gradient].storage
        if identity in given and storage is not None and storage not in external and graph.storages[storage].bytes:
            size, device = graph.storages[storage].bytes, graph.storages[storage].device
            yield MemoryEvent(What.FREE, device, size, (index, storage), Kind.GRADIENT)
        given.add(identity)


def _products(graph: Graph, action: object, *, forward: bool) -> Iterator[MemoryEvent]:
    if isinstance(action, Run) and multiplies(graph.ops[action.op]):
        yield MemoryEvent(What.MULTIPLY, device_of_action(graph, action), 0, forward)


def multiplies(op: Op) -> bool:
    """Return whether an operator may call cuBLAS."""
    _, name, *_ = (*str(op.target).split("."), "")
    return name in PRODUCTS or op.target in RECURRENT


def _usual_device(graph: Graph) -> str:
    """Where most of a graph's storages are: that of memory which no value stands for."""
    devices = [storage.device for storage in graph.storages]
    return max(sorted(set(devices)), key=devices.count, default="cpu")
