"""From plans to the plan: the fastest that fits a budget, or the smallest within an overhead."""

from __future__ import annotations

from collections.abc import Sequence

from encore.errors import BudgetError, Pin
from encore.graph import Graph
from encore.options import Budget, Options
from encore.plan.plan import Plan
from encore.report.format import bytes_text

LISTED_PINS = 5


def choose(plans: Sequence[Plan], options: Options, *, beside: int = 0) -> Plan:
    """Pick from the plans of one graph. `beside` counts bytes that are alive next to this graph's step."""
    unplanned = plans[0]
    if options.budget is None:
        allowed = [plan for plan in plans if plan.overhead <= options.allowed_overhead]
        return min(allowed or [unplanned], key=lambda plan: (plan.timeline.step_peak, plan.overhead))
    beside += options.resident
    smallest = min(plans, key=lambda plan: plan.timeline.step_peak)
    floor = _total(smallest, beside)
    limit = options.budget.resolve(_total(unplanned, beside), floor)
    fitting = [plan for plan in plans if _total(plan, beside) <= limit]
    if not fitting:
        raise budget_error(smallest, options.budget, limit, floor)
    return min(fitting, key=lambda plan: (plan.overhead, plan.timeline.step_peak))


def _total(plan: Plan, beside: int) -> int:
    return plan.timeline.resident + plan.timeline.step_peak + beside


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
    return [pin_of(graph, storage) for storage in plan.timeline.alive_at_worst[:LISTED_PINS]]


def pin_of(graph: Graph, storage: int) -> Pin:
    value = graph.values[graph.storages[storage].values[0]]
    producer = graph.producer(value.id)
    return Pin(
        name=value.name,
        module=producer.module if producer else "",
        source=producer.source if producer else "",
        shape=value.shape,
        bytes=graph.storages[storage].bytes,
    )
