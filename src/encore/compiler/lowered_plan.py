"""The chosen plan of one graph as two callables, and what is known of it."""

from __future__ import annotations

import dataclasses
import logging

from encore.capture import torch_private
from encore.compiler.captured import Captured
from encore.compiler.chosen_plan import Fitting
from encore.compiler.notes import device_notes, loop_notes, workspace_notes
from encore.compiler.observers import link_lessons, lossy_check
from encore.compiler.session import CapturedGraph
from encore.compiler.stage_clock import StageClock, collector_paused
from encore.compiler.variants import Variant
from encore.compiler.watch import watches
from encore.errors import CheckError, IllegalGraphError
from encore.graph import verify_graph
from encore.lower import lower
from encore.plan import Plan, worth_having
from encore.schedule import Schedule, replay
from encore.units import bytes_text

log = logging.getLogger("encore")


def with_saving_order(fitting: Fitting) -> Fitting:
    """The same plan, with what it saves in the order in which AOTAutograd wants it."""
    plan = fitting.fused.plan
    ordered = dataclasses.replace(plan, schedule=_in_saving_order(fitting.captured, plan.schedule))
    with collector_paused():
        verify_graph(ordered.schedule.graph)
    return dataclasses.replace(fitting, fused=dataclasses.replace(fitting.fused, plan=ordered))


def _in_saving_order(captured: Captured, schedule: Schedule) -> Schedule:
    names = {schedule.graph.values[value].name: value for value in schedule.saved}
    ordered = torch_private.unchecked_last(captured.joint, tuple(names))
    return dataclasses.replace(schedule, saved=tuple(names[name] for name in ordered))


def lower_plan(fitting: Fitting, unplanned: Plan, clock: StageClock) -> Variant:
    """Two callables that run the plan, filed with what is known of it."""
    captured, found, forms = fitting.captured, fitting.fused, fitting.candidates.forms
    session, plan, offers = captured.session, found.plan, fitting.candidates.offers
    # An estimate compiles no kernels: it runs the operators, on tensors without memory.
    runs = plan.schedule if captured.runs else _in_saving_order(captured, forms.first.kept.schedule)
    watching = watches(plan) if captured.runs else {}
    transports = session.transports if plan.tiers and captured.runs else {}
    if session.checks:
        _replay(captured, plan)
    name = captured.name.replace(" ", "_")
    footprint = None if captured.options.budget is None else captured.options.budget.footprint
    with collector_paused():
        lowered = lower(runs, name, found.kernels, watching, transports, checked=session.checks)
    clock.lap("lower")
    graph = CapturedGraph(
        name=captured.name,
        unplanned=unplanned,
        plan=plan,
        limit=captured.options.budget.bytes if captured.options.budget is not None else None,
        footprint=None if footprint is None else footprint.alone(),
        break_reason=captured.break_reason,
        break_line=captured.break_line,
        seconds=clock.seconds,
        sources=(lowered.forward_source, lowered.backward_source),
        rewrites=forms.passes[plan.lean],
        kernels_compiled=found.compiled,
        watches=tuple(watching.values()),
        offers=() if captured.runs else offers,
        choices=tuple(offer.peak_and_overhead for offer in worth_having(offers)),
        notes=(
            *workspace_notes(plan.schedule.graph, session.workspaces),
            *loop_notes(plan.schedule.graph),
            *device_notes(plan.schedule.graph),
            *captured.notes,
        ),
        lossy_check=lossy_check(captured, found, fitting.chosen.error),
        lessons=link_lessons(captured, plan),
    )
    return Variant(captured.used, graph, lowered)


def _replay(captured: Captured, plan: Plan) -> None:
    """Have the replayer follow what is lowered, within the peak that was predicted."""
    try:
        replay(plan.schedule, limit=plan.timeline.step_peak, workspace=captured.session.workspaces)
    except IllegalGraphError as error:
        raise CheckError(f"ENCORE_CHECK: {captured.name}: {error}. This is a bug in Encore: please report it") from None


def log_graph(captured: CapturedGraph) -> None:
    graph, timeline = captured.plan.schedule.graph, captured.plan.timeline
    log.info(
        "%s: %d operators, peak %s (saved %s), plan %r; seconds: %s",
        captured.name, len(graph.ops), bytes_text(timeline.step_peak), bytes_text(timeline.saved), captured.plan.name,
        ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in captured.seconds.items()),
    )  # fmt: skip
