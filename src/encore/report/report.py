"""What a step takes and what was decided, as data: `Report` after the first step, `Estimate` before it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from encore.errors import BudgetError
from encore.options import Budget, Options, make_options, parse_budget
from encore.plan import (
    GraphPlan,
    Plan,
    SavedPlan,
    choose,
    stack_plans,
    worth_having,
)
from encore.report.allocations import Allocation, allocations_of
from encore.report.names import operator_name
from encore.report.points import Curve, Point, best
from encore.report.profile import Profile, profile_of
from encore.report.table import render
from encore.schedule import Fused, Kind, Timeline
from encore.units import bytes_text
from encore.whole_files import write_whole

if TYPE_CHECKING:
    from encore.compiler.session import CapturedGraph, PlainGraph
    from encore.compiler.watch import CodeWatch


FIRST_STEP = {
    "capture": ("dynamo", "capture", "capture of repeats", "facts", "verify"),
    "plan": ("plan",),
    "compile": ("compile", "lower"),
    "first run": ("first forward", "first backward"),
}
"""What the stages of a first step are to a user who waits for it."""
NO_PLAN = SavedPlan("", ())
NUMBERS = re.compile(r"\[\n[-+.,eE\d\s]+\]")
"""A list of numbers in indented JSON, which goes on one line: a timeline has thousands."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step, predicted."""

    step_peak: int
    """Most bytes the step holds at once, gradients included, above what was alive when it began."""
    saved: int
    """Bytes alive between forward and backward."""
    overhead: float
    """Extra time over the unplanned step, as a fraction."""
    seconds: float
    """The step's time; 0 where no plan was looked for."""
    at_peak: dict[str, int]
    """Bytes alive at the worst moment, by kind."""
    profile: Profile
    """Memory over the step, by kind."""
    stall: float = 0.0
    """Seconds, of those of the step, that it stands still for feature maps on their way to a tier or back."""
    moved: int = 0
    """Bytes that go to tiers."""


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """What becomes of one feature map."""

    value: str
    module: str
    source: str
    shape: tuple[int, ...]
    bytes: int
    action: str
    why: str
    seconds: float
    """What having it again costs."""
    operator: str = ""
    """What makes it."""
    held: int = 0
    """Bytes that are held in its place between forward and backward: its own where it is kept."""
    code: str = ""
    """What it is held as, if not as it is: a codec, or every how many steps a recurrent layer keeps its state."""
    lossless: bool = True
    """Does it come back bit for bit?"""
    largest: int | None = None
    """Bytes of its largest code so far, where they depend on the data: `held` is what was planned."""
    dense: int | None = None
    """Bytes that its code takes at most, whatever the data, where they depend on it."""
    planned_density: float | None = None
    """The share of non-zeros that was planned for; of integers, the share of a number's bytes."""
    density: float | None = None
    """The largest such share so far."""
    error: float | None = None
    """How far off it came back at the first step, where it loses something: the largest difference as a share of its
    largest number."""
    error_bound: float | None = None
    """How far off it could have come back, in the same way: what its codec promises for such numbers."""


@dataclass(frozen=True, slots=True)
class LossyRow:
    """What lossy codecs may do to the gradients, and what they do. Errors are relative, over all parameters together:
    `encore.cost.gradient_error` has the definition."""

    bound: float | None
    """Largest gradient error that codecs were chosen for; None: codecs were named, without a bound."""
    error: float | None
    """The largest gradient error that was measured; of a step of several graphs, the sum of theirs. None: not yet."""
    largest: float | None
    """The largest error of a single parameter in these measurements."""
    checks: tuple[tuple[int, float], ...] = ()
    """Steps that were checked, counted from 0, with their gradient errors; of the first graph that has lossy codecs."""
    why_not: str = ""
    """Why there is no measurement, or why the latest one could not be made."""

    @property
    def holds(self) -> bool | None:
        """Is every measured error within the bound? None where there is no bound or no measurement."""
        return None if self.bound is None or self.error is None else self.error <= self.bound


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One graph of the step; a model that breaks has several."""

    name: str
    operators: int
    step_peak: int
    saved: int
    break_reason: str
    break_line: str
    seconds: dict[str, float]
    """The first step, stage by stage."""
    kernels: int
    """Distinct fused kernels."""
    kernel_calls: int
    """How often a step calls one."""
    kernels_compiled: int
    """How many of them were compiled for this graph: the others were there, in memory or on disk."""
    rewrites: tuple[str, ...]
    """Passes of the fused lowering that changed the graph."""
    notes: tuple[str, ...] = ()
    """Why the prediction, or equality with eager, may not hold."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a step takes, and what was decided, as plain numbers and names: no graph and no tensor is held. `print` it,
    look at it (`to_html`, `to_png`, `to_snapshot`), or take `to_json()`."""

    name: str
    resident: int
    """Bytes of parameters, buffers and inputs, and of what `resident=` or `optimizer=` added."""
    budget: int | None
    """Upper bound on resident + step_peak, in bytes, where one was given."""
    asked: str
    """What the plan was to do."""
    unplanned: Prediction
    planned: Prediction
    pareto: Curve
    """The plans there were to pick from: (resident + step_peak in bytes, overhead), fastest first. What the plan that
    was taken needs is exact, what others need is as close as the search looked."""
    decisions: tuple[DecisionRow, ...]
    graphs: tuple[GraphRow, ...]
    plain: tuple[str, ...]
    """Parts that run as plain PyTorch, and why."""
    lowering: str
    plan: SavedPlan = field(default=NO_PLAN, repr=False, compare=False)
    """What was decided, to be saved and used again: `encore.compile(model, plan=...)`."""
    allocations: tuple[Allocation, ...] = field(default=(), repr=False, compare=False)
    """Everything the planned step allocates, in order."""
    beside: int = 0
    """The part of `resident` that `resident=` or `optimizer=` added."""
    stalled: float | None = None
    """Seconds that the latest step did stand still for transfers; None before a step that has some."""
    lossy: LossyRow | None = None
    """The gradient error of lossy codecs; None where none were allowed."""

    @classmethod
    def of(
        cls, name: str, graphs: Sequence[CapturedGraph], options: Options, plain: Sequence[PlainGraph] = ()
    ) -> Report:
        """Put the graphs of one step together."""
        distinct = list({id(graph): graph for graph in graphs}.values())
        plans = [graph.plan for graph in graphs]
        resident = stack_plans(plans).resident + options.resident
        planned = _predict(plans, options.resident)
        return cls(
            name=name,
            resident=resident,
            budget=graphs[-1].limit,
            asked=_asked(options),
            unplanned=_predict([graph.unplanned for graph in graphs], options.resident),
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
        )

    @property
    def densest_step_peak(self) -> int:
        """What the step holds at most, should every map that was planned as sparse come out dense, and every integer
        take all of its bytes. The predicted peak itself, where no code depends on the data."""
        return self.planned.step_peak + sum(row.dense - row.held for row in self.decisions if row.dense is not None)

    @property
    def first_step(self) -> dict[str, float]:
        """Seconds of the first step: capture, plan, compile, first run."""
        total = dict.fromkeys(FIRST_STEP, 0.0)
        for row in {row.name: row for row in self.graphs}.values():
            for stage, seconds in row.seconds.items():
                total[next(name for name, stages in FIRST_STEP.items() if stage in stages)] += seconds
        return total

    def to_dict(self) -> dict[str, Any]:
        told = dataclasses.asdict(dataclasses.replace(self, plan=NO_PLAN, allocations=()))
        del told["plan"], told["allocations"]
        return {"encore_report": 1, **told}

    def to_json(self) -> str:
        """The whole report as JSON; `encore_report` is the version of its layout."""
        return NUMBERS.sub(lambda found: " ".join(found[0].split()), json.dumps(self.to_dict(), indent=2))

    def to_html(
        self, path: str | os.PathLike[str], *, measured: Sequence[Point] = (), peers: Sequence[Point] = ()
    ) -> Path:
        """Write a page with memory over the step, the plans there were and every decision. It opens without a network.
        What was `measured`, and what `peers` take, are drawn beside the plans."""
        from encore.report.page import page

        return write_whole(path, page(self, measured=measured, peers=peers).encode())

    def to_png(self, path: str | os.PathLike[str]) -> Path:
        """Write a picture of memory over the step; wants matplotlib (`pip install encore-torch[plots]`)."""
        from encore.report.picture import timeline_png

        return write_whole(path, timeline_png(self))

    def to_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write the predicted step as a snapshot that PyTorch's memory viewer opens (pytorch.org/memory_viz)."""
        from encore.report.snapshot import snapshot_bytes

        return write_whole(path, snapshot_bytes(self))

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True)
class Estimate:
    """A step that has not run: what it would take, and which budgets it would fit."""

    report: Report
    captured: tuple[CapturedGraph, ...]
    options: Options

    def beside(self, *, resident: int = 0, optimizer: Any = None) -> Estimate:
        """The same step with so many bytes beside it, or with an optimizer's state: budgets must hold them, too."""
        counted = make_options({"resident": resident, "optimizer": optimizer}).resident
        options = dataclasses.replace(self.options, resident=counted)
        report = Report.of(self.report.name, self.captured, options)
        return Estimate(dataclasses.replace(report, plain=self.report.plain), self.captured, options)

    @property
    def resident(self) -> int:
        return self.report.resident

    @property
    def unplanned(self) -> Prediction:
        return self.report.unplanned

    @property
    def floor(self) -> int:
        """Lowest reachable resident + step_peak."""
        return _total_of(self._pick(Options(budget=Budget(), resident=self.options.resident)), self.options)

    @functools.cached_property
    def pareto(self) -> tuple[tuple[int, float], ...]:
        """Every plan worth having: (resident + step_peak in bytes, overhead), fastest first."""
        levels = sorted({offer.overhead for graph in self.captured for offer in worth_having(graph.offers)})
        found: list[tuple[int, float]] = []
        for level in levels:
            plans = self._pick(Options(overhead=level, resident=self.options.resident))
            total = _total_of(plans, self.options)
            if not found or total < found[-1][0]:
                found.append((total, max(plan.overhead for plan in plans)))
        return tuple(found)

    def fits(self, budget: int | float | str | Budget) -> bool:
        """Is there a plan within the budget?"""
        try:
            self._pick(dataclasses.replace(self.options, budget=parse_budget(budget), overhead=None))
        except BudgetError:
            return False
        return True

    def plan(self, budget: int | float | str | Budget) -> Report:
        """The report of the plan this budget would get; raises `BudgetError` where there is none."""
        wanted = parse_budget(budget)
        options = dataclasses.replace(self.options, budget=wanted, overhead=None)
        planned = [
            dataclasses.replace(
                graph,
                plan=plan,
                limit=self._of_step(wanted, place).bytes,
                choices=tuple(offer.told for offer in worth_having(graph.offers)),
            )
            for place, (graph, plan) in enumerate(zip(self.captured, self._pick(options), strict=True))
        ]
        report = Report.of(self.report.name, planned, options)
        exact: Curve = self.__dict__.get("pareto", report.pareto)
        return dataclasses.replace(report, plain=self.report.plain, pareto=exact)

    def _pick(self, options: Options) -> list[Plan]:
        """The plan of every graph, as the running step would pick them one after the other."""
        plans: list[Plan] = []
        for place, graph in enumerate(self.captured):
            within = options
            if options.budget is not None:
                within = dataclasses.replace(options, budget=self._of_step(options.budget, place))
            plans.append(choose(graph.offers, within, unplanned=graph.unplanned, earlier=plans).plan)
        return plans

    def _of_step(self, budget: Budget, place: int) -> Budget:
        """The budget for the graphs of the step up to this place; a share is one of what they take unplanned."""
        unplanned = [graph.unplanned for graph in self.captured[: place + 1]]
        return budget.of_step(_total_of(unplanned, self.options))

    def __str__(self) -> str:
        return str(self.report)


def _total_of(plans: Sequence[Plan], options: Options) -> int:
    return stack_plans(plans).total + options.resident


# -- from graphs to numbers ------------------------------------------------------------------------------------------


def _asked(options: Options) -> str:
    if options.plan is not None:
        return "a plan made before"
    if options.budget is None:
        return f"the smallest peak for at most {100 * options.allowed_overhead:.3g} % more time"
    if options.budget.is_floor:
        return "the lowest reachable peak"
    if options.budget.share is not None:
        return f"the fastest step within {100 * options.budget.share:.4g} % of the largest unplanned step"
    return f"the fastest step within {bytes_text(options.budget.resolve(0))}"


def _pareto(graphs: Sequence[CapturedGraph], resident: int, planned: Prediction) -> Curve:
    """The plan that was taken and, for a step of one graph, those that were not: what several graphs would hold
    together is known of plans that have been built, and only the one that is taken has."""
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
