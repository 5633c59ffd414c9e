"""A step of several graphs: forwards in order, backwards in reverse, each on top of what the others save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from encore.graph import Graph, Role
from encore.schedule.simulator import Kind, Timeline

KINDS = tuple(Kind)
NOTHING = (0,) * len(KINDS)


@dataclass(frozen=True, slots=True)
class Stack:
    """What the whole step takes."""

    parameters: int
    """Parameters and buffers of all graphs."""
    inputs: int
    """The inputs of the first graph: later ones get theirs from the step."""
    step_peak: int
    saved: int
    """Bytes alive between the last forward and the first backward."""
    worst: int
    """The graph that is running at the worst moment."""

    @property
    def resident(self) -> int:
        return self.parameters + self.inputs

    @property
    def total(self) -> int:
        return self.resident + self.step_peak


@dataclass(frozen=True, slots=True)
class Stretch:
    """Moments of one graph that the step passes without a break, and what its other graphs keep meanwhile."""

    graph: int
    moments: range
    held: tuple[int, ...]
    """Bytes in the order of `Kind`."""


def stretches(graphs: Sequence[Graph], timelines: Sequence[Timeline]) -> list[Stretch]:
    """The step from its first moment to its last."""
    forwards, backwards = [], []
    saved_before = [NOTHING]
    for index, timeline in enumerate(timelines):
        between = next(place for place, moment in enumerate(timeline.moments) if moment.phase == "between")
        forwards.append(Stretch(index, range(between), saved_before[-1]))
        saved_before.append(_sum(saved_before[-1], _own(timeline, between)))
    left_behind = NOTHING
    given: set[int] = set()
    for index in reversed(range(len(timelines))):
        end = len(timelines[index].moments)
        backwards.append(
            Stretch(index, range(forwards[index].moments.stop, end), _sum(saved_before[index], left_behind))
        )
        left_behind = _sum(left_behind, _own(timelines[index], end - 1))
        if index:
            left_behind = _sum(left_behind, _of_kind(Kind.GRADIENT, -gradients_passed_on(graphs[index])))
        left_behind = _sum(left_behind, _of_kind(Kind.GRADIENT, -_added_up(graphs[index], given)))
    return forwards + backwards


def stack(graphs: Sequence[Graph], timelines: Sequence[Timeline]) -> Stack:
    """Put the simulated graphs of one step together."""
    peaks = []
    for part in stretches(graphs, timelines):
        moments = timelines[part.graph].moments
        highest = max((moments[place].peak for place in part.moments), default=0)
        peaks.append((sum(part.held) + highest, part.graph))
    step_peak, worst = max(peaks)
    sizes = dict.fromkeys(Kind, 0)
    for index, value, kind in residents(graphs):
        sizes[kind] += graphs[index].bytes_of(value)
    return Stack(
        parameters=sizes[Kind.PARAMETER],
        inputs=sizes[Kind.INPUT],
        step_peak=step_peak,
        saved=sum(timeline.saved for timeline in timelines),
        worst=worst,
    )


def residents(graphs: Sequence[Graph]) -> list[tuple[int, int, Kind]]:
    """What is there before the step and after it, one value a storage: parameters and buffers of all graphs, the inputs
    of the first, constants. Each with its graph, and whether it is a parameter or an input."""
    found: dict[object, tuple[int, int, Kind]] = {}
    for index, graph in enumerate(graphs):
        for position, primal in enumerate(graph.primals):
            value = graph.values[primal]
            owned = value.role in (Role.PARAMETER, Role.BUFFER)
            if value.storage is not None and (owned or index == 0):
                key = graph.identities[position] if owned and graph.identities else None
                place = (index, value.storage) if key is None else key
                found[place] = (index, primal, Kind.PARAMETER if owned else Kind.INPUT)
        for constant in graph.constants:
            found[index, graph.values[constant].storage] = (index, constant, Kind.INPUT)
    return list(found.values())


def gradients_passed_on(graph: Graph) -> int:
    """Gradients of inputs: the graph before counts them as its tangents."""
    return sum(
        graph.values[gradient].bytes
        for primal, gradient in graph.with_gradients()
        if gradient is not None and graph.values[primal].role is not Role.PARAMETER
    )


def _added_up(graph: Graph, given: set[int]) -> int:
    """Gradients of parameters that a backward before has given, too: autograd adds them up in its memory."""
    found = 0
    for place, (_, gradient) in enumerate(graph.with_gradients()):
        identity = graph.identities[place] if graph.identities else None
        if gradient is not None and identity is not None:
            found += graph.bytes_of(gradient) if identity in given else 0
            given.add(identity)
    return found


def _own(timeline: Timeline, place: int) -> tuple[int, ...]:
    """What the step has allocated and keeps at a moment, by kind."""
    by_kind = timeline.moments[place].by_kind
    return tuple(0 if kind in (Kind.PARAMETER, Kind.INPUT) else size for kind, size in zip(KINDS, by_kind, strict=True))


def _of_kind(kind: Kind, size: int) -> tuple[int, ...]:
    return tuple(size if kind is other else 0 for other in KINDS)


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(mine + its for mine, its in zip(left, right, strict=True))
