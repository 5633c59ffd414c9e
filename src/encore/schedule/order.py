"""The order of a step in which everything is kept: eager's own, with each value freed at its last use.

Forward operators keep their order. Backward operators that wait for a tangent keep theirs too; whatever else backward
needs (a transposed weight, `1 - y` of a sigmoid) runs right before its first reader, since running it early would
only take memory. Signs that a pass has taken of a map run where they were put, since the map goes then. Of the values
that cross, the owner of the memory is saved and its views are taken again in backward: a view costs a microsecond and
no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.ops import SIDE_EFFECTS
from encore.schedule.actions import Action, Free, Fused, Run, Schedule
from encore.schedule.kernel import Group, describe_kernel
from encore.schedule.reuse import write_over_dying

SMALLER = frozenset({torch.ops.encore.encode_sign.default, torch.ops.encore.encode_inside.default})
"""What backward makes of a larger value so that this can go."""


def schedule_step(graph: Graph) -> Schedule:
    """The keep-everything schedule of a step."""
    forward = [op for op in graph.ops if op.forward]
    backward, saved = order_backward(graph)
    outputs = {value for value in graph.outputs if value is not None}
    gradients = {value for value in graph.gradients if value is not None}
    constants = set(graph.constants)
    return Schedule(
        graph=graph,
        forward=free_at_last_use(graph, forward, graph.primals, keep=outputs | set(saved) | constants),
        backward=free_at_last_use(graph, backward, (*saved, *graph.tangents), keep=gradients | constants),
        saved=saved,
    )


def order_backward(graph: Graph) -> tuple[list[Op], tuple[int, ...]]:
    """Backward's operators in order, and the values it takes from forward."""
    order: list[Op] = []
    saved: dict[int, None] = {}
    available = {*graph.tangents, *graph.constants}

    def provide(values: Iterable[int]) -> None:
        """Make the values available: by running what makes them, or from forward."""
        pending = list(values)
        while pending:
            value = pending[-1]
            producer = graph.producer(value)
            if value in available:
                pending.pop()
            elif producer is None or (producer.forward and producer.kind is not OpClass.VIEW):
                saved[value] = None
                available.add(value)
                pending.pop()
            else:
                missing = [operand for operand in producer.reads if operand not in available]
                if missing:
                    pending.extend(missing)
                else:
                    pending.pop()
                    order.append(producer)
                    available.update(written for written in producer.writes if written is not None)

    waiting = set(graph.tangents)
    for op in graph.ops:
        if not op.forward and (waiting.intersection(op.reads) or op.kind in SIDE_EFFECTS or op.target in SMALLER):
            waiting.update(value for value in op.writes if value is not None)
            provide(op.reads)
            order.append(op)
            available.update(value for value in op.writes if value is not None)
    provide(value for value in graph.gradients if value is not None)
    return order, tuple(saved)


def free_at_last_use(
    graph: Graph, items: Sequence[Op | Group], given: Iterable[int], keep: set[int]
) -> tuple[Action, ...]:
    """Operators and groups as a stream, each name forgotten right after its last use (or its birth, if it has none)."""
    given = tuple(given)
    last_use = {value: position for position, item in enumerate(items) for value in item.reads}
    over = write_over_dying(graph, items, last_use, frozenset(given), frozenset(keep))
    actions: list[Action] = [Free(value) for value in given if value not in last_use and value not in keep]
    for position, item in enumerate(items):
        actions.append(_action(graph, item, over.get(position, ())))
        dying = [value for value in item.reads if last_use[value] == position and value not in keep]
        unread = [value for value in item.writes if value is not None and value not in last_use and value not in keep]
        actions += [Free(value) for value in (*dying, *unread)]
    return tuple(actions)


def _action(graph: Graph, item: Op | Group, over: Sequence[tuple[int, int]]) -> Action:
    if isinstance(item, Op):
        return Run(item.id, over[0][1] if over else None)
    kernel = describe_kernel(graph, item, over)
    return Fused(tuple(op.id for op in item.ops), item.reads, item.writes, tuple(over), kernel)
