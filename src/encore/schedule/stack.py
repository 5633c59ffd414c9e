"""A step of several graphs: forwards in order, backwards in reverse, each on top of what the others hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from encore.graph import Graph, Role
from encore.schedule.simulate import Timeline


@dataclass(frozen=True, slots=True)
class Stack:
    """What the whole step takes."""

    resident: int
    """Parameters and buffers of all graphs, and the inputs of the first: later ones get theirs from the step."""
    step_peak: int
    saved: int
    """Bytes alive between the last forward and the first backward."""
    worst: int
    """The graph that is running at the worst moment."""

    @property
    def total(self) -> int:
        return self.resident + self.step_peak


def stack(graphs: Sequence[Graph], timelines: Sequence[Timeline]) -> Stack:
    """Put the simulated graphs of one step together."""
    saved_before = [0]
    for timeline in timelines:
        saved_before.append(saved_before[-1] + timeline.saved)
    left_behind = 0
    peaks = []
    for index in reversed(range(len(timelines))):
        timeline = timelines[index]
        forward = max((moment.peak for moment in timeline.moments if moment.phase == "forward"), default=0)
        rest = max(moment.peak for moment in timeline.moments if moment.phase != "forward")
        peaks.append((saved_before[index] + max(forward, rest + left_behind), index))
        passed_on = gradients_passed_on(graphs[index]) if index else 0
        left_behind += timeline.moments[-1].live - passed_on
    step_peak, worst = max(peaks)
    return Stack(resident=_resident(graphs), step_peak=step_peak, saved=saved_before[-1], worst=worst)


def gradients_passed_on(graph: Graph) -> int:
    """Gradients of inputs: the graph before counts them as its tangents."""
    return sum(
        graph.values[gradient].bytes
        for primal, gradient in zip(graph.primals, graph.gradients, strict=False)
        if gradient is not None and graph.values[primal].role is not Role.PARAMETER
    )


def _resident(graphs: Sequence[Graph]) -> int:
    sizes: dict[object, int] = {}
    for index, graph in enumerate(graphs):
        for position, primal in enumerate(graph.primals):
            value = graph.values[primal]
            owned = value.role in (Role.PARAMETER, Role.BUFFER)
            if value.storage is not None and (owned or index == 0):
                key = graph.identities[position] if owned and graph.identities else None
                sizes[(index, value.storage) if key is None else key] = graph.storages[value.storage].bytes
        for constant in graph.constants:
            sizes[index, graph.values[constant].storage] = graph.bytes_of(constant)
    return sum(sizes.values())
