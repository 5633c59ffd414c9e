"""Stores and loads while operators run: begun as early as memory allows, waited for as late as it allows.

A schedule in which values go to a tier is legal as it comes from `order.py`: every store and every load is an operator
that takes its time. Here each becomes two actions. A store begins at its place; its operand is kept until a `Wait`,
which comes where its bytes are needed for something else, or well after it must be over. A load begins as soon as
there is room for its bytes from there to its first reader, and is waited for right before that. Nothing in flight ever
raises the peak: the limit is that of the schedule without transfers in flight.

Time is that of one channel, which serves one transfer after the other while operators run. These take the seconds they
were measured to take, and longer while a transfer is on its way, which wants a processor, too. What a `Wait` has to
wait in this model is the stall; both are part of a plan's cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from encore.fates import Link
from encore.graph import Graph, Op
from encore.graph.tier_ops import LoadFrom, StoreTo
from encore.schedule.actions import Action, Free, Fused, Load, Run, Schedule, Store, Wait
from encore.schedule.simulator import Timeline

Bytes = npt.NDArray[np.int64]
Duration = Callable[[Graph, Op | Fused, int | None], float]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that move: out, from `place` on, or back, in time for `place`."""

    place: int
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A schedule whose transfers run concurrently with its operators."""

    schedule: Schedule
    stall: float = 0.0
    """Seconds that the step stands still, waiting for bytes."""
    lost: float = 0.0
    """Seconds by which computing is slower for concurrent transfers."""
    moved: int = 0
    """Bytes that go to tiers."""


def place_transfers(schedule: Schedule, timeline: Timeline, seconds: Duration, links: Mapping[str, Link]) -> Placed:
    """The schedule with its stores and loads begun early and waited for late, within its own peak."""
    graph = schedule.graph
    out = [place for place, action in enumerate(schedule.forward) if _moves(graph, action, StoreTo)]
    back = [place for place, action in enumerate(schedule.backward) if _moves(graph, action, LoadFrom)]
    if not out:
        return Placed(schedule)
    used = [links[op.target.tier] for op in _ops(graph, schedule.forward, out)]
    depth, pace = min(link.depth for link in used), min(link.pace for link in used)
    stores = []
    for place, op in zip(out, _ops(graph, schedule.forward, out), strict=True):
        size, link = graph.bytes_of(op.reads[0]), links[op.target.tier]
        stores.append(Transfer(place + 1, size, link.store_seconds(size)))
    loads = []
    for place, op in zip(back, _ops(graph, schedule.backward, back), strict=True):
        assert op.writes[0] is not None
        size, link = graph.bytes_of(op.writes[0]), links[op.target.tier]
        loads.append(Transfer(place, size, link.load_seconds(size)))
    waits, stalled_out, lost_out = place_stores(
        _room(timeline, "forward"), _durations(graph, schedule.forward, seconds), stores, depth, pace
    )
    begins, stalled_back, lost_back = place_loads(
        _room(timeline, "backward"), _durations(graph, schedule.backward, seconds), loads, depth, pace
    )
    placed = Schedule(graph, _forward(schedule, out, waits), _backward(schedule, back, begins), schedule.saved)
    moved = sum(store.size for store in stores)
    return Placed(placed, stalled_out + stalled_back, lost_out + lost_back, moved)


def place_stores(
    room: Bytes, seconds: Sequence[float], stores: Sequence[Transfer], depth: int, pace: float
) -> tuple[list[int], float, float]:
    """Before which action to wait for each store; the seconds of waiting, and those by which actions take longer.
    `room` is what each action leaves once all that is stored is gone; the end of the stream waits for what is left."""
    waits = [len(room)] * len(stores)
    clock = _Clock(pace)
    flying: deque[tuple[int, float]] = deque()
    held = begun = 0
    for place in range(stores[0].place if stores else len(room), len(room) + 1):
        while begun < len(stores) and stores[begun].place == place:
            flying.append((begun, clock.begin(stores[begun].seconds)))
            held += stores[begun].size
            begun += 1
        while flying:
            oldest, over = flying[0]
            must = place == len(room) or held > room[place] or len(flying) >= depth
            if not must and clock.now < over + stores[oldest].seconds:  # give it twice the time, since clocks differ
                break
            flying.popleft()
            clock.wait(over)
            held -= stores[oldest].size
            waits[oldest] = place
        if place < len(room):
            clock.run(seconds[place])
    return waits, clock.stall, clock.lost


def place_loads(
    room: Bytes, seconds: Sequence[float], loads: Sequence[Transfer], depth: int, pace: float
) -> tuple[list[int], float, float]:
    """Before which action to begin each load; the seconds of waiting, and those by which actions take longer. Loads
    begin in the order in which they are needed."""
    left = room.copy()
    begins: list[int] = []
    for number, load in enumerate(loads):
        first = begins[-1] if begins else 0
        if number >= depth:
            first = max(first, loads[number - depth].place + 1)
        first = min(first, load.place)
        short = np.flatnonzero(left[first : load.place] < load.size)
        begin = first + int(short[-1]) + 1 if len(short) else first
        left[begin : load.place] -= load.size
        begins.append(begin)
    clock = _Clock(pace)
    waiting: deque[float] = deque()
    begun = needed = 0
    for place in range(loads[-1].place + 1 if loads else 0):
        while begun < len(loads) and begins[begun] == place:
            waiting.append(clock.begin(loads[begun].seconds))
            begun += 1
        while needed < len(loads) and loads[needed].place == place:
            clock.wait(waiting.popleft())
            needed += 1
        clock.run(seconds[place])
    return begins, clock.stall, clock.lost


class _Clock:
    """The time of a step and of the channel for its transfers."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.now = 0.0
        self.stall = 0.0
        self.lost = 0.0
        self.free_at = 0.0
        """When the channel is done with all it was given."""

    def begin(self, seconds: float) -> float:
        """Give a transfer to the channel; when it will be over."""
        self.free_at = max(self.now, self.free_at) + seconds
        return self.free_at

    def wait(self, over: float) -> None:
        self.stall += max(0.0, over - self.now)
        self.now = max(self.now, over)

    def run(self, seconds: float) -> None:
        """An action, at the pace that the channel leaves it."""
        shared = min(max(0.0, self.free_at - self.now), seconds / self.pace)
        self.lost += shared * (1 - self.pace)
        self.now += seconds + shared * (1 - self.pace)


def _forward(schedule: Schedule, out: Sequence[int], waits: Sequence[int]) -> tuple[Action, ...]:
    """A stored value is forgotten at its wait."""
    graph = schedule.graph
    ops = [op.id for op in _ops(graph, schedule.forward, out)]
    waited: dict[int, list[int]] = {}
    for op, place in zip(ops, waits, strict=True):
        waited.setdefault(place, []).append(op)
    stored = {graph.ops[op].reads[0] for op in ops}
    actions: list[Action] = []
    for place, action in enumerate((*schedule.forward, None)):
        for op in waited.get(place, ()):
            actions += (Wait(op), Free(graph.ops[op].reads[0]))
        if isinstance(action, Run) and isinstance(graph.ops[action.op].target, StoreTo):
            actions.append(Store(action.op))
        elif action is not None and not (isinstance(action, Free) and action.value in stored):
            actions.append(action)
    return tuple(actions)


def _backward(schedule: Schedule, back: Sequence[int], begins: Sequence[int]) -> tuple[Action, ...]:
    graph = schedule.graph
    begun: dict[int, list[int]] = {}
    for op, place in zip(_ops(graph, schedule.backward, back), begins, strict=True):
        begun.setdefault(place, []).append(op.id)
    actions: list[Action] = []
    for place, action in enumerate(schedule.backward):
        actions += (Load(op) for op in begun.get(place, ()))
        moves = _moves(graph, action, LoadFrom)
        actions.append(Wait(action.op) if moves and isinstance(action, Run) else action)
    return tuple(actions)


def _moves(graph: Graph, action: Action, kind: type) -> bool:
    return isinstance(action, Run) and isinstance(graph.ops[action.op].target, kind)


def _ops(graph: Graph, actions: Sequence[Action], places: Sequence[int]) -> list[Op]:
    runs = (actions[place] for place in places)
    return [graph.ops[run.op] for run in runs if isinstance(run, Run)]


def _room(timeline: Timeline, phase: str) -> Bytes:
    """What every action of a phase leaves of the peak, while it runs and right before."""
    before = timeline.step_peak
    needed = []
    for moment in timeline.moments:
        if moment.phase == phase:
            needed.append(max(before, moment.peak))
            before = moment.live
    return timeline.step_peak - np.array(needed, dtype=np.int64)


def _durations(graph: Graph, actions: Sequence[Action], seconds: Duration) -> list[float]:
    durations = []
    for action in actions:
        spent = 0.0
        if isinstance(action, Fused):
            spent = seconds(graph, action, None)
        elif isinstance(action, Run) and not isinstance(graph.ops[action.op].target, StoreTo | LoadFrom):
            spent = seconds(graph, graph.ops[action.op], action.over)
        durations.append(spent)
    return durations
