"""From the graphs of a step to its report: plain numbers and names, which keep no graph and no tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from encore.compiler.allocations import allocations_of
from encore.compiler.operator_names import operator_name
from encore.compiler.profiles import profile_of
from encore.compiler.session import CapturedGraph, PlainGraph
from encore.compiler.step_calls import Program
from encore.compiler.watch import CodeWatch
from encore.options import Options
from encore.plan import DeviceBytes, GraphPlan, Plan, SavedPlan, stack_plans
from encore.plan.goal import Footprint
from encore.reports.points import Curve, best
from encore.reports.report import DecisionRow, DeviceRow, GraphRow, LossyRow, Prediction, Report
from encore.reports.steps import MeasuredStep
from encore.schedule import Fused, Kind, Timeline
from encore.units import bytes_text


def report_of(
    name: str,
    graphs: Sequence[CapturedGraph],
    options: Options,
    plain: Sequence[PlainGraph] = (),
    program: Program | None = None,
    measured: MeasuredStep | None = None,
) -> Report:
    """Put the graphs of one step together; `program` is what is known of a step of several calls, `measured` what the
    allocator gave for one that ran."""
    distinct = list({id(graph): graph for graph in graphs}.values())
    plans = [graph.plan for graph in graphs]
    resident = stack_plans(plans).resident + options.resident
    planned = _predict(plans, options.resident)
    unplanned = _predict([graph.unplanned for graph in graphs], options.resident)
    limit, footprint = graphs[-1].limit, graphs[-1].footprint
    if program is not None and program.shared is not None:
        resident, limit, footprint = program.resident, program.limit, program.footprint
        around = program.around if len(program.around) == len(plans) else ()
        planned = _as_observed(planned, program.shared.step_peak, program.shared.seconds)
        unplanned = _as_observed(unplanned, program.unplanned, unplanned.seconds)
        if around:
            planned = dataclasses.replace(planned, profile=profile_of(plans, options.resident, around))
            kept = profile_of([graph.unplanned for graph in graphs], options.resident, around)
            unplanned = dataclasses.replace(unplanned, profile=kept)
    return Report(
        name=name,
        resident=resident,
        budget=limit,
        asked=_asked(options),
        unplanned=unplanned,
        planned=planned,
        pareto=_pareto(graphs, resident, planned),
        decisions=tuple(row for graph in distinct for row in _decisions(graph)),
        graphs=tuple(_graph_row(graph) for graph in graphs),
        plain=tuple(f"{part.name}: {part.reason}" for part in plain),
        lowering=options.lowering,
        plan=SavedPlan(
            options.lowering,
            tuple(GraphPlan.of(graph.unplanned.schedule.graph, graph.plan) for graph in distinct),
        ),
        allocations=allocations_of(plans),
        beside=options.resident,
        stalled=_stalled(graphs),
        lossy=_lossy(distinct, options),
        measured=measured,
        devices=() if program is not None and program.sharded else _devices(plans, options.resident, footprint),
    )


def _devices(plans: Sequence[Plan], beside: int, footprint: Footprint | None) -> tuple[DeviceRow, ...]:
    """What the step takes of each device."""
    reserved = {} if footprint is None else footprint.by_device(plans)
    limits = {} if footprint is None else footprint.limits
    return tuple(
        DeviceRow(one.device, one.resident, one.step_peak, reserved.get(one.device), limits.get(one.device))
        for one in DeviceBytes.of_step(plans, beside)
    )


def _asked(options: Options) -> str:
    if options.plan is not None:
        return "a plan made before"
    if options.budget is None:
        return f"the smallest peak for at most {100 * options.allowed_overhead:.3g} % more time"
    if options.budget.is_floor:
        return "the lowest reachable peak"
    if options.budget.share is not None:
        return f"the fastest step within {100 * options.budget.share:.4g} % of the largest unplanned step"
    if options.budget.device:
        return "the fastest step that fits the device"
    return f"the fastest step within {bytes_text(options.budget.resolve(0))}"


def _pareto(graphs: Sequence[CapturedGraph], resident: int, planned: Prediction) -> Curve:
    """The plan that was taken and, for a step of one graph, those that were not: the memory of several graphs
    together is known of built plans only, and only the one that is taken was built."""
    taken = (resident + planned.step_peak, planned.overhead)
    if len(graphs) > 1:
        return (taken,)
    plan = graphs[0].plan
    others = [(resident + peak, overhead) for peak, overhead in graphs[0].choices if overhead != plan.overhead]
    return best([(resident + plan.timeline.step_peak, plan.overhead), *others])


def _predict(plans: Sequence[Plan], beside: int) -> Prediction:
    whole = stack_plans(plans)
    worst = plans[whole.worst].timeline
    at_peak = _kinds_at_worst(worst)
    if whole.step_peak > worst.step_peak:
        at_peak["other graphs"] = whole.step_peak - worst.step_peak
    return Prediction(
        step_peak=whole.step_peak,
        saved=whole.saved,
        overhead=_overhead(plans),
        seconds=sum(plan.seconds for plan in plans),
        at_peak=at_peak,
        profile=profile_of(plans, beside),
        stall=sum(plan.stall for plan in plans),
        moved=sum(plan.moved for plan in plans),
    )


def _as_observed(predicted: Prediction, step_peak: int, seconds: float) -> Prediction:
    """The prediction for a step of several calls, which was observed: it counts plain code between the calls, and the
    outputs that are freed there."""
    at_peak = {kind: size for kind, size in predicted.at_peak.items() if kind != "other graphs"}
    others = step_peak - sum(at_peak.values())
    return dataclasses.replace(
        predicted, step_peak=step_peak, seconds=seconds, at_peak={**at_peak, "other calls and plain code": others}
    )


def _stalled(graphs: Sequence[CapturedGraph]) -> float | None:
    moving = [graph for graph in graphs if graph.plan.tiers and "backward" in graph.stalled]
    return sum(sum(graph.stalled.values()) for graph in moving) if moving else None


def _lossy(graphs: Sequence[CapturedGraph], options: Options) -> LossyRow | None:
    """Errors of later graphs pass on to earlier ones through the gradients of their inputs: to first order they add."""
    if not options.lossy:
        return None
    using = [graph for graph in graphs if not all(fate.lossless for fate in graph.plan.fates)]
    checks = [graph.lossy_check for graph in using if graph.lossy_check is not None]
    errors = [check.error for check in checks if check.error is not None]
    why_not = next((check.why_not for check in checks if check.why_not), "")
    if not using:
        return LossyRow(options.lossy.bound, 0.0, 0.0)
    if not checks:
        return LossyRow(options.lossy.bound, None, None, why_not="an estimate runs nothing, so no error is measured")
    if len(errors) < len(checks):
        return LossyRow(options.lossy.bound, None, None, why_not=why_not or "no step has run its backward yet")
    return LossyRow(
        bound=options.lossy.bound,
        error=sum(one.relative for one in errors),
        largest=max(one.largest for one in errors),
        checks=tuple((step, one.relative) for step, one in checks[0].measured.items()),
        why_not=why_not,
    )


def _overhead(plans: Sequence[Plan]) -> float:
    """Of all graphs together: extra seconds over seconds without, where the seconds are known."""
    whole = sum(plan.seconds for plan in plans)
    before = sum(plan.seconds / (1 + plan.overhead) for plan in plans)
    return whole / before - 1 if before else max(plan.overhead for plan in plans)


def _kinds_at_worst(timeline: Timeline) -> dict[str, int]:
    by_kind = dict(zip(Kind, timeline.moments[timeline.worst].by_kind, strict=True))
    by_kind[Kind.WORKSPACE] = timeline.workspace_at_worst
    return {kind.value: size for kind, size in by_kind.items() if kind not in (Kind.PARAMETER, Kind.INPUT)}


def _decisions(captured: CapturedGraph) -> list[DecisionRow]:
    graph = captured.plan.schedule.graph
    seen = {watch.name: watch for watch in captured.watches}
    rows = []
    for value_id, decision in captured.plan.decisions.items():
        value, producer = graph.values[value_id], graph.producer(value_id)
        fate = decision.fate
        size, shape = decision.whole or (graph.bytes_of(value_id), value.shape)
        dense, planned_density = fate.bytes_by_data(value) or (None, None)
        rows.append(
            DecisionRow(
                value=value.name,
                module=producer.module if producer else "",
                source=producer.source if producer else "",
                shape=shape,
                bytes=size,
                action=fate.kind,
                why=decision.why,
                seconds=decision.seconds,
                operator=operator_name(producer) if producer else "",
                held=decision.held,
                code=fate.code,
                lossless=fate.lossless,
                largest=_seen_bytes(seen.get(value.name)),
                dense=dense,
                planned_density=planned_density,
                density=seen[value.name].density if value.name in seen else None,
                error=seen[value.name].error if value.name in seen else None,
                error_bound=seen[value.name].error_bound if value.name in seen else None,
            )
        )
    return rows


def _seen_bytes(watch: CodeWatch | None) -> int | None:
    return watch.most if watch is not None and watch.most and not watch.codec.exact_size else None


def _graph_row(captured: CapturedGraph) -> GraphRow:
    schedule = captured.plan.schedule
    fused = [action for action in (*schedule.forward, *schedule.backward) if isinstance(action, Fused)]
    return GraphRow(
        name=captured.name,
        operators=len(captured.plan.schedule.graph.ops),
        step_peak=captured.plan.timeline.step_peak,
        saved=captured.plan.timeline.saved,
        break_reason=captured.break_reason,
        break_line=captured.break_line,
        seconds=dict(captured.seconds),
        kernels=len({action.kernel.key for action in fused}),
        kernel_calls=len(fused),
        kernels_compiled=captured.kernels_compiled,
        rewrites=captured.rewrites,
        notes=captured.notes,
    )
