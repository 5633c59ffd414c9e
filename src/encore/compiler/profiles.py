"""From the plans of a step to its memory profile: the simulator's moments as columns of bytes by kind.

A step of thousands of operators is drawn a thousand pixels wide, so a long one is thinned out: of each stretch of
moments the lowest and the highest stay, and with them the peak, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from encore.compiler.operator_names import operator_name, place_of
from encore.plan import Plan, stack_plans
from encore.report.profile import LAYERS, Profile
from encore.schedule import Free, Fused, Kind, Load, Run, Schedule, Store, Wait, stretches
from encore.schedule.simulator import Moment

STRETCHES = 500
"""Stretches that a long step is cut into; two points of each are kept."""


def profile_of(plans: Sequence[Plan], beside: int) -> Profile:
    """The profile of a step that runs these plans; `beside` bytes are alive for other reasons."""
    whole = stack_plans(plans)
    parts = stretches([plan.schedule.graph for plan in plans], [plan.timeline for plan in plans])
    steps = [
        (plans[part.graph], plans[part.graph].timeline.moments[place], part.held)
        for part in parts
        for place in part.moments
    ]
    heights = [moment.peak + sum(held) for _, moment, held in steps]
    kept = thinned(heights, STRETCHES)
    always = {"parameters": whole.parameters, "inputs": whole.inputs, "beside the step": beside}
    columns: dict[str, list[int]] = {layer: [] for layer in LAYERS}
    for position in kept:
        _, moment, held = steps[position]
        now = dict(zip(Kind, (mine + its for mine, its in zip(moment.by_kind, held, strict=True)), strict=True))
        now[Kind.WORKSPACE] += moment.peak - moment.live
        for layer, kinds in LAYERS.items():
            columns[layer].append(always[layer] if layer in always else sum(now[kind] for kind in kinds))
    return Profile(
        moments=len(steps),
        at=tuple(kept),
        backward=sum(len(part.moments) for part in parts[: len(plans)]),
        what=tuple(_what(steps[position][0].schedule, steps[position][1]) for position in kept),
        bytes={layer: tuple(column) for layer, column in columns.items()},
        peak=max(range(len(kept)), key=lambda point: heights[kept[point]]),
    )


def thinned(heights: Sequence[int], stretches: int) -> list[int]:
    """Positions that show the shape of a curve: all of a short one, else the lowest and highest of each stretch."""
    if len(heights) <= 2 * stretches:
        return list(range(len(heights)))
    kept = []
    for number in range(stretches):
        stretch = range(number * len(heights) // stretches, (number + 1) * len(heights) // stretches)
        ends = {min(stretch, key=heights.__getitem__), max(stretch, key=heights.__getitem__)}
        kept += sorted(ends)
    return kept


def _what(schedule: Schedule, moment: Moment) -> str:
    """A moment in words: `backward: mm, encoder.0 (nmt.py:12)`."""
    graph, action = schedule.graph, moment.action
    match action:
        case Run():
            op = graph.ops[action.op]
            again = " again" if op.again else ""
            return f"{moment.phase}: {operator_name(op)}{again}{place_of(op)}"
        case Fused():
            first = graph.ops[action.ops[0]]
            return f"{moment.phase}: kernel of {len(action.ops)} operators{place_of(first)}"
        case Store() | Load() | Wait():
            op, waits = graph.ops[action.op], "wait for " if isinstance(action, Wait) else ""
            return f"{moment.phase}: {waits}{operator_name(op)}{place_of(op)}"
        case Free():
            return f"{moment.phase}: release {graph.values[action.value].name}"
    return {"between": "forward is done", "end": "backward is done"}[moment.phase]
