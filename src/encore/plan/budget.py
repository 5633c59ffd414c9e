"""From plans to the plan: the fastest that fits a budget, or the smallest within an overhead."""

from __future__ import annotations

from collections.abc import Sequence

from encore.errors import BudgetError, Pin
from encore.graph import Graph
from encore.plan.candidate import Candidate, by_methods
from encore.plan.device_bytes import DeviceBytes
from encore.plan.goal import Budget, Goal
from encore.plan.plan import Plan
from encore.schedule import Stack, alive_at_worst, stack
from encore.units import bytes_text

LISTED_PINS = 5
NEAR = 1.08
"""How far a candidate's peak may be from that of its plan."""
LOOKED_AT = 2
"""Candidates of each set of methods that are built to find the smallest plan: their order is nearly that of their
plans."""


def will_do(as_it_is: Candidate, goal: Goal, *, unplanned: Plan, earlier: Sequence[Plan] = ()) -> bool:
    """Return whether keeping everything meets the goal, so that no other plan needs to be looked for."""
    if goal.budget is None:
        return goal.allowed_overhead == 0
    if goal.budget.is_floor:
        return False
    return keeps_budget(as_it_is.plan, goal, unplanned=unplanned, earlier=earlier)


def may_win(
    fastest: float, found: Sequence[Candidate], goal: Goal, *, unplanned: Plan, earlier: Sequence[Plan] = ()
) -> bool:
    """Return whether `choose` may pick one of further candidates, of which the fastest has this overhead. The first one
    that was found keeps everything."""
    if goal.budget is None:
        return fastest <= goal.allowed_overhead
    if goal.budget.is_floor or goal.budget.footprint is not None or _devices(found[0].plan) > 1:
        return True
    room = room_for(found[0].plan, goal, unplanned=unplanned, earlier=earlier)
    return not any(one.overhead <= fastest and one.step_peak * NEAR <= room for one in found)


def room_for(kept: Plan, goal: Goal, *, unplanned: Plan, earlier: Sequence[Plan] = ()) -> int:
    """The step peak that a plan may have at most within the budget, which is not the floor; `kept` keeps everything.
    What is reserved is no less than what is allocated, and each device has the budget to itself."""
    assert goal.budget is not None
    limit = goal.budget.resolve(taken([*earlier, unplanned], goal)) * _devices(kept)
    return limit - stack_plans([*earlier, kept]).total - goal.resident + kept.timeline.step_peak


def keeps_budget(plan: Plan, goal: Goal, *, unplanned: Plan, earlier: Sequence[Plan] = ()) -> bool:
    """Return whether a plan, as it came out in the end, stays within the budget. The floor is no bound."""
    if goal.budget is None or goal.budget.is_floor:
        return True
    return taken([*earlier, plan], goal) <= goal.budget.resolve(taken([*earlier, unplanned], goal))


def taken(plans: Sequence[Plan], goal: Goal) -> int:
    """What budgets bound: what a step takes of a device that runs these plans, one after the other."""
    footprint = None if goal.budget is None else goal.budget.footprint
    return allocated_bytes(plans, goal.resident) if footprint is None else footprint(plans)


def allocated_bytes(plans: Sequence[Plan], resident: int) -> int:
    """The bytes that are allocated at once in a step with these plans, and `resident` ones; on the device with the most
    of them, if there are several."""
    if max(map(_devices, plans)) == 1:
        return stack_plans(plans).total + resident
    return max(one.total for one in DeviceBytes.of_step(plans, resident))


def _devices(plan: Plan) -> int:
    return len({storage.device for storage in plan.schedule.graph.storages}) or 1


def choose(
    candidates: Sequence[Candidate],
    goal: Goal,
    *,
    unplanned: Plan | None = None,
    earlier: Sequence[Plan] = (),
    thorough: bool = True,
) -> Candidate:
    """Pick from the candidates for one graph; `earlier` are the plans of the graphs that the step has run before it. A
    `thorough` choice also builds faster plans than the one that fits, since they may take less than was estimated.

    The first candidate keeps everything; `unplanned` is what percentages are of, where that is another plan. The peak
    of a candidate is an estimate; those that come into question are built, and the peak of the plan itself counts.
    """
    if goal.budget is None:
        return _smallest_within(candidates, goal.allowed_overhead)

    def total(plan: Plan) -> int:
        return taken([*earlier, plan], goal)

    kept = candidates[0].plan
    if goal.budget.is_floor:
        return min(lowest(candidates), key=lambda candidate: (total(candidate.plan), candidate.plan.overhead))
    limit = goal.budget.resolve(total(unplanned or kept))
    if total(kept) <= limit:
        return candidates[0]
    room = room_for(kept, goal, unplanned=unplanned or kept, earlier=earlier)
    ordered = sorted(candidates, key=lambda candidate: (candidate.overhead, candidate.step_peak))
    found = next((one for one in ordered if one.step_peak <= room * NEAR and total(one.plan) <= limit), None)
    if found is not None and not thorough:
        return found
    smallest = lowest(candidates if found is None else ordered[: ordered.index(found)])
    faster = [candidate for candidate in smallest if total(candidate.plan) <= limit]
    if found is not None or faster:
        return min([*faster, *([found] if found else [])], key=lambda candidate: candidate.overhead)
    tried = [*smallest, *(one for one in ordered if one.step_peak <= room * NEAR)]
    plan = min((candidate.plan for candidate in tried), key=total)
    raise budget_error(plan, goal.budget, limit, total(plan), tiers=bool(goal.tiers))


def _smallest_within(candidates: Sequence[Candidate], overhead: float) -> Candidate:
    """The smallest peak that costs at most this much extra time."""
    allowed = [candidate for candidate in candidates if candidate.overhead <= overhead]
    return min(
        [*lowest(allowed), candidates[0]],
        key=lambda candidate: (candidate.plan.timeline.step_peak, candidate.overhead),
    )


def lowest(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates among which the smallest plan is: those that a search with fewer methods would look at, too,
    unless they are farther off than an estimate can be."""
    least = min((candidate.step_peak for candidate in candidates), default=0)
    found: dict[Candidate, None] = {}
    for searched in by_methods(candidates):
        ordered = sorted(searched, key=lambda candidate: (candidate.step_peak, candidate.overhead))[:LOOKED_AT]
        found.update(dict.fromkeys(candidate for candidate in ordered if candidate.step_peak <= least * NEAR**2))
    return list(found)


def stack_plans(plans: Sequence[Plan]) -> Stack:
    """What a step takes that runs these plans one after the other."""
    return stack([plan.schedule.graph for plan in plans], [plan.timeline for plan in plans])


def budget_error(
    plan: Plan, budget: Budget | None, limit: int, floor: int, *, tiers: bool = False, what: str = ""
) -> BudgetError:
    """The error for a budget below the floor: the lowest peak, what pins it, what would help. With `tiers`, offloading
    was allowed already."""
    pins = pins_of(plan)
    remedies = (
        f"raise the budget to {floor} bytes ({bytes_text(floor)})",
        *(() if tiers else ("let feature maps go to disk (tiers='disk')",)),
        "use a smaller batch or shorter sequences",
        "compute in a narrower type (torch.autocast)",
    )
    lines = [
        f"a budget of {budget} ({bytes_text(limit)}) cannot be met: "
        f"the lowest reachable peak{what and f' of {what}'} {is_text(plan, budget, floor)}",
        "alive at that moment:",
        *(f"  {bytes_text(pin.bytes):>10}  {pin.name} {list(pin.shape)}  {pin.module} {pin.source}" for pin in pins),
        "what helps: " + "; ".join(remedies),
    ]
    return BudgetError("\n".join(lines), floor=floor, pins=pins, remedies=remedies)


def is_text(plan: Plan, budget: Budget | None, floor: int) -> str:
    """What the lowest peak is; with a bound on what a device reserves, next to what is allocated of it."""
    text = f"{floor} bytes ({bytes_text(floor)})"
    if budget is None or budget.footprint is None:
        return f"is {text}"
    allocated = bytes_text(allocated_bytes([plan], 0))
    return f"reserves {text}, of which {allocated} are allocated for parameters, inputs and the step"


def pins_of(plan: Plan) -> list[Pin]:
    """The largest tensors alive at the plan's worst moment."""
    graph = plan.schedule.graph
    return [pin_of(graph, value) for value in alive_at_worst(plan.schedule, plan.timeline)[:LISTED_PINS]]


def pin_of(graph: Graph, value_id: int) -> Pin:
    value, producer = graph.values[value_id], graph.producer(value_id)
    return Pin(
        name=value.name,
        module=producer.module if producer else "",
        source=producer.source if producer else "",
        shape=value.shape,
        bytes=graph.bytes_of(value_id),
    )
