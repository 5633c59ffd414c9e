"""What a step takes and what was decided, as data: `Report` after the first step, `Estimate` before it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from encore.errors import BudgetError
from encore.options import Budget, Options, make_options, parse_budget
from encore.plan import GraphPlan, Plan, SavedPlan, choose, stack_plans
from encore.report.table import render
from encore.schedule import Fused, Kind, Timeline

if TYPE_CHECKING:
    from encore.capture.session import CapturedGraph, PlainGraph


FIRST_STEP = {
    "capture": ("dynamo", "capture", "capture of repeats", "facts", "verify"),
    "plan": ("plan",),
    "compile": ("compile", "lower"),
    "first run": ("first forward", "first backward"),
}
"""What the stages of a first step are to a user who waits for it."""


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


@dataclass(frozen=True, slots=True)
class Report:
    """What a step takes, and what was decided. `print` it, or take `to_json()`."""

    name: str
    resident: int
    """Bytes of parameters, buffers and inputs, and of what `resident=` or `optimizer=` added."""
    unplanned: Prediction
    planned: Prediction
    decisions: tuple[DecisionRow, ...]
    graphs: tuple[GraphRow, ...]
    plain: tuple[str, ...]
    """Parts that run as plain PyTorch, and why."""
    lowering: str
    captured: tuple[CapturedGraph, ...] = field(default=(), repr=False, compare=False)
    """The graphs that it tells about."""
    beside: int = 0
    """The part of `resident` that `resident=` or `optimizer=` added."""

    @classmethod
    def of(
        cls, name: str, graphs: Sequence[CapturedGraph], options: Options, plain: Sequence[PlainGraph] = ()
    ) -> Report:
        """Put the graphs of one step together."""
        distinct = list({id(graph): graph for graph in graphs}.values())
        return cls(
            name=name,
            resident=stack_plans([graph.plan for graph in graphs]).resident + options.resident,
            unplanned=_predict([graph.unplanned for graph in graphs]),
            planned=_predict([graph.plan for graph in graphs]),
            decisions=tuple(row for graph in distinct for row in _decisions(graph)),
            graphs=tuple(_graph_row(graph) for graph in graphs),
            plain=tuple(f"{part.name}: {part.reason}" for part in plain),
            lowering=options.lowering,
            captured=tuple(distinct),
            beside=options.resident,
        )

    @property
    def plan(self) -> SavedPlan:
        """What was decided, to be saved and used again: `encore.compile(model, plan=...)`."""
        graphs = (GraphPlan.of(graph.unplanned.schedule.graph, graph.plan) for graph in self.captured)
        return SavedPlan(self.lowering, tuple(graphs))

    @property
    def first_step(self) -> dict[str, float]:
        """Seconds of the first step: capture, plan, compile, first run."""
        total = dict.fromkeys(FIRST_STEP, 0.0)
        for row in {row.name: row for row in self.graphs}.values():
            for stage, seconds in row.seconds.items():
                total[next(name for name, stages in FIRST_STEP.items() if stage in stages)] += seconds
        return total

    def to_dict(self) -> dict[str, Any]:
        told = dataclasses.asdict(dataclasses.replace(self, captured=()))
        del told["captured"]
        return {"encore_report": 1, **told}

    def to_json(self) -> str:
        """The whole report as JSON; `encore_report` is the version of its layout."""
        return json.dumps(self.to_dict(), indent=2)

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
        parts = self.report.resident - self.report.beside
        return Estimate(
            dataclasses.replace(self.report, resident=parts + counted, beside=counted), self.captured, options
        )

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
        levels = sorted({offer.overhead for graph in self.captured for offer in graph.offers})
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
            self.plan(budget)
        except BudgetError:
            return False
        return True

    def plan(self, budget: int | float | str | Budget) -> Report:
        """The report of the plan this budget would get; raises `BudgetError` where there is none."""
        options = dataclasses.replace(self.options, budget=parse_budget(budget), overhead=None)
        picked = zip(self.captured, self._pick(options), strict=True)
        planned = [dataclasses.replace(graph, plan=plan) for graph, plan in picked]
        return dataclasses.replace(Report.of(self.report.name, planned, options), plain=self.report.plain)

    def _pick(self, options: Options) -> list[Plan]:
        """The plan of every graph, as the running step would pick them one after the other."""
        plans: list[Plan] = []
        for graph in self.captured:
            plans.append(choose(graph.offers, options, earlier=plans).plan)
        return plans

    def __str__(self) -> str:
        return str(self.report)


def _total_of(plans: Sequence[Plan], options: Options) -> int:
    return stack_plans(plans).total + options.resident


# -- from graphs to numbers ------------------------------------------------------------------------------------------


def _predict(plans: Sequence[Plan]) -> Prediction:
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
    rows = []
    for value_id, decision in captured.plan.decisions.items():
        value, producer = graph.values[value_id], graph.producer(value_id)
        rows.append(
            DecisionRow(
                value=value.name,
                module=producer.module if producer else "",
                source=producer.source if producer else "",
                shape=value.shape,
                bytes=graph.bytes_of(value_id),
                action=decision.action,
                why=decision.why,
                seconds=decision.seconds,
            )
        )
    return rows


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
    )
