"""From plans to the plan: the fastest that fits a budget, or the smallest within an overhead."""

from __future__ import annotations

from collections.abc import Sequence

from encore.errors import BudgetError, Pin
from encore.graph import Graph
from encore.options import Budget, Options
from encore.plan.plan import Plan
from encore.schedule import Stack, alive_at_worst, stack
from encore.units import bytes_text

LISTED_PINS = 5


def choose(plans: Sequence[Plan], options: Options, *, earlier: Sequence[Plan] = ()) -> Plan:
    """Pick from the plans of one graph; `earlier` are the plans of the graphs that the step has run before it."""
    unplanned = plans[0]
    if options.budget is None:
        allowed = [plan for plan in plans if plan.overhead <= options.allowed_overhead]
        return min(allowed or [unplanned], key=lambda plan: (plan.timeline.step_peak, plan.overhead))

    def total(plan: Plan) -> int:
        return stack_plans([*earlier, plan]).total + options.resident

    smallest = min(plans, key=total)
    floor = total(smallest)
    limit = options.budget.resolve(total(unplanned), floor)
    fitting = [plan for plan in plans if total(plan) <= limit]
    if not fitting:
        raise budget_error(smallest, options.budget, limit, floor)
    return min(fitting, key=lambda plan: (plan.overhead, plan.timeline.step_peak))


def stack_plans(plans: Sequence[Plan]) -> Stack:
    """What a step takes that runs these plans one after the other."""
    return stack([plan.schedule.graph for plan in plans], [plan.timeline for plan in plans])


def budget_error(plan: Plan, budget: Budget, limit: int, floor: int) -> BudgetError:
    """The refusal: how low it goes, what pins it there, what would help."""
    pins = pins_of(plan)
    remedies = (
        f"raise the budget to {floor} bytes ({bytes_text(floor)})",
        "use a smaller batch or shorter sequences",
        "compute in a narrower type (torch.autocast)",
    )
    lines = [
        f"a budget of {budget} ({bytes_text(limit)}) cannot be met: "
        f"the lowest reachable peak is {floor} bytes ({bytes_text(floor)})",
        "alive at that moment:",
        *(f"  {bytes_text(pin.bytes):>10}  {pin.name} {list(pin.shape)}  {pin.module} {pin.source}" for pin in pins),
        "what helps: " + "; ".join(remedies),
    ]
    return BudgetError("\n".join(lines), floor=floor, pins=pins, remedies=remedies)


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
