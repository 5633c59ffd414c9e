"""From the plans of a step to its memory profile: the simulator's moments as columns of bytes by kind.

A step of thousands of operators is drawn a thousand pixels wide, so a long one is thinned out: of each stretch of
moments the lowest and the highest stay, and with them the peak, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encore.compiler.operator_names import operator_name, place_of
from encore.plan import Plan, stack_plans
from encore.plan.calls import Around, CallCosts, freed_gradients
from encore.reports.profile import LAYERS, OUTSIDE, Profile
from encore.schedule import Free, Fused, Kind, Load, Run, Schedule, Store, Wait, stretches
from encore.schedule.simulator import Moment

STRETCHES = 500
"""Stretches that a long step is cut into; two points of each are kept."""


def profile_of(plans: Sequence[Plan], beside: int, around: Sequence[Around] = ()) -> Profile:
    """The profile of a step that runs these plans; `beside` bytes are alive for other reasons. `around` is what was
    observed around each call of a step of several calls."""
    whole = stack_plans(plans)
    points = list(_points_around(plans, around) if around else _points(plans))
    heights = [point.peak + sum(point.held) + point.outside for point in points]
    kept = thinned(heights, STRETCHES)
    always = {"parameters": whole.parameters, "inputs": whole.inputs, "beside the step": beside}
    columns: dict[str, list[int]] = {layer: [] for layer in LAYERS}
    for position in kept:
        point = points[position]
        now = {**dict.fromkeys(Kind, 0), **dict(zip(Kind, point.held, strict=True))}
        if point.moment is not None:
            for kind, mine in zip(Kind, point.moment.by_kind, strict=True):
                now[kind] += mine
            now[Kind.WORKSPACE] += point.moment.peak - point.moment.live
        given = {**always, OUTSIDE: point.outside}
        for layer, kinds in LAYERS.items():
            columns[layer].append(given[layer] if layer in given else sum(now[kind] for kind in kinds))
    return Profile(
        moments=len(points),
        at=tuple(kept),
        backward=sum(point.forward for point in points),
        what=tuple(points[position].what for position in kept),
        bytes={layer: tuple(column) for layer, column in columns.items()},
        peak=max(range(len(kept)), key=lambda point: heights[kept[point]]),
    )


@dataclass(frozen=True, slots=True)
class _Point:
    """A moment of one call, and what is alive next to it."""

    plan: Plan | None
    """None for code outside of the captured graphs."""
    moment: Moment | None
    held: tuple[int, ...]
    """What other calls keep, in the order of `Kind`."""
    outside: int = 0
    forward: bool = False

    @property
    def peak(self) -> int:
        return 0 if self.moment is None else self.moment.peak

    @property
    def what(self) -> str:
        if self.plan is None or self.moment is None:
            return "code outside of the captured graphs, between forward and backward"
        return _what(self.plan.schedule, self.moment)


def _points(plans: Sequence[Plan]) -> Iterator[_Point]:
    parts = stretches([plan.schedule.graph for plan in plans], [plan.timeline for plan in plans])
    for number, part in enumerate(parts):
        plan = plans[part.graph]
        for place in part.moments:
            yield _Point(plan, plan.timeline.moments[place], part.held, forward=number < len(plans))


def _points_around(plans: Sequence[Plan], around: Sequence[Around]) -> Iterator[_Point]:
    """The calls of a step in order, forwards and then backwards, each on what the calls before it save and on what was
    observed around it."""
    costs = [CallCosts.of(plan) for plan in plans]
    saved = [sum(cost.saved for cost in costs[:number]) for number in range(len(costs) + 1)]
    ends = [[moment.phase for moment in plan.timeline.moments].index("between") + 1 for plan in plans]
    for number, plan in enumerate(plans):
        for moment in plan.timeline.moments[: ends[number]]:
            yield _Point(plan, moment, _feature_maps(saved[number]), around[number].forward, forward=True)
    yield _Point(None, None, _feature_maps(saved[-1]), around[-1].between)
    for number, plan in reversed(list(enumerate(plans))):
        backward = plan.timeline.moments[ends[number] :]
        # Outputs that outlive the call are observed around it.
        twice = max(moment.peak for moment in backward) - costs[number].backward_peak
        freed = freed_gradients(plan.schedule.graph, backward) if around[number].frees_received else [0] * len(backward)
        for moment, less in zip(backward, freed, strict=True):
            yield _Point(plan, moment, _feature_maps(saved[number]), around[number].backward - twice - less)


def _feature_maps(size: int) -> tuple[int, ...]:
    return tuple(size if kind is Kind.FEATURE_MAP else 0 for kind in Kind)


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
