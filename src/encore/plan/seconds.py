"""What a step takes by the clock, as plans see it."""

from __future__ import annotations

from typing import Protocol

from encore.graph import Graph, Op
from encore.schedule import Fused, Run, Schedule


class ActionSeconds(Protocol):
    """What operators and kernels take: `encore.cost.Seconds`."""

    def __call__(self, graph: Graph, op: Op | Fused, over: int | None = None) -> float: ...

    def inside(self, graph: Graph, op: Op) -> float: ...


def step_seconds(schedule: Schedule, seconds: ActionSeconds) -> float:
    """What a step takes: the sum of its operators and kernels."""
    graph = schedule.graph
    total = 0.0
    for action in (*schedule.forward, *schedule.backward):
        if isinstance(action, Run):
            total += seconds(graph, graph.ops[action.op], action.over)
        elif isinstance(action, Fused):
            total += seconds(graph, action)
    return total
