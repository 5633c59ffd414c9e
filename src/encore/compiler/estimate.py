"""`Estimate`: a step that has not run, and the budgets that it would fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encore.compiler.device_budget import on_devices
from encore.compiler.recording import Recording
from encore.compiler.session import CapturedGraph
from encore.compiler.step_plans import StepPlans
from encore.compiler.summary import report_of
from encore.cost import Workspaces
from encore.errors import BudgetError
from encore.options import Budget, Options, make_options, parse_budget
from encore.plan import Plan, allocated_bytes, choose, worth_having
from encore.reports.points import Curve
from encore.reports.report import Prediction, Report
from encore.units import bytes_text

LOSS_OUTSIDE = "the loss is outside of the model, and what it allocates is not in this estimate"


@dataclass(frozen=True)
class Estimate:
    """A step that has not run: what it would take, and which budgets it would fit."""

    report: Report
    captured: tuple[CapturedGraph, ...]
    """The graphs of a step that calls each of them once, whole."""
    options: Options
    step: StepPlans | None = None
    """All calls of another step."""
    largest: Estimate | None = None
    """The estimate of the largest batch, if one was given."""

    @classmethod
    def of(cls, recording: Recording) -> Estimate:
        """The estimate of a step that was recorded."""
        session = recording.session
        name, options = session.name, session.options
        step = StepPlans(recording, options) if recording.calls else None
        graphs = () if step is not None else tuple(session.last_step)
        report = report_of(name, graphs, options) if step is None else _report_of(name, step, options)
        plain = tuple(f"{part.name}: {part.reason}" for part in session.plain)
        return cls(dataclasses.replace(report, plain=plain), graphs, options, step)

    def beside(self, *, resident: int = 0, optimizer: Any = None) -> Estimate:
        """The same step with so many more resident bytes, or with an optimizer's state, which count in budgets, too."""
        counted = make_options({"resident": resident, "optimizer": optimizer}).resident
        options = dataclasses.replace(self.options, resident=counted)
        step = None if self.step is None else self.step.beside(options)
        if step is None:
            report = report_of(self.report.name, self.captured, options)
        else:
            report = _report_of(self.report.name, step, options)
        largest = None if self.largest is None else self.largest.beside(resident=counted)
        return Estimate(dataclasses.replace(report, plain=self.report.plain), self.captured, options, step, largest)

    @property
    def resident(self) -> int:
        return self.report.resident

    @property
    def unplanned(self) -> Prediction:
        return self.report.unplanned

    @property
    def taken_unplanned(self) -> int:
        """What the step takes with everything kept, resident bytes included."""
        return self.resident + self.unplanned.step_peak

    def _asked(self, budget: int | float | str | Budget) -> Budget:
        """The budget; if there is a largest batch, a percentage is one of its step."""
        wanted = parse_budget(budget)
        if self.largest is None or wanted.share is None:
            return wanted
        return Budget(bytes=wanted.resolve(max(self.taken_unplanned, self.largest.taken_unplanned)))

    @property
    def floor(self) -> int:
        """Lowest reachable resident + step_peak."""
        if self.step is not None:
            return self.step.resident + self.step.floor
        return _total_of(self._pick(Options(budget=Budget(), resident=self.options.resident)), self.options)

    @functools.cached_property
    def pareto(self) -> tuple[tuple[int, float], ...]:
        """Every plan worth having: (resident + step_peak in bytes, overhead), fastest first."""
        if self.step is not None:
            return tuple((self.step.resident + one.step_peak, self.step.overhead(one)) for one in self.step.front)
        levels = sorted({offer.overhead for graph in self.captured for offer in worth_having(graph.offers)})
        found: list[tuple[int, float]] = []
        for level in levels:
            plans = self._pick(Options(overhead=level, resident=self.options.resident))
            total = _total_of(plans, self.options)
            if not found or total < found[-1][0]:
                found.append((total, max(plan.overhead for plan in plans)))
        return tuple(found)

    def fits(self, budget: int | float | str | Budget) -> bool:
        """Return whether there is a plan within the budget, for the largest batch as well, if there is one."""
        wanted = self._asked(budget)
        if self.largest is not None and not self.largest.fits(wanted):
            return False
        if self.step is not None:
            limit = self.step.limit(wanted)
            return limit is None or self.step.taken(self.step.within(limit)) <= limit
        try:
            self._pick(dataclasses.replace(self.options, budget=wanted, overhead=None))
        except BudgetError:
            return False
        return True

    def plan(self, budget: int | float | str | Budget) -> Report:
        """The report of the plan this budget would get; raises `BudgetError` where there is none."""
        wanted = self._asked(budget)
        options = dataclasses.replace(self.options, budget=wanted, overhead=None)
        if self.step is not None:
            report = _report_of(self.report.name, self.step, options)
            return dataclasses.replace(report, plain=self.report.plain, pareto=self.pareto)
        planned = [
            dataclasses.replace(
                graph,
                plan=plan,
                limit=self._of_step(wanted, place).bytes,
                choices=tuple(offer.peak_and_overhead for offer in worth_having(graph.offers)),
            )
            for place, (graph, plan) in enumerate(zip(self.captured, self._pick(options), strict=True))
        ]
        report = report_of(self.report.name, planned, options)
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
        asked = budget.of_step(_total_of(unplanned, self.options))
        graphs, workspaces = [plan.schedule.graph for plan in unplanned], Workspaces(run=False)
        return on_devices(asked, graphs, self.options, workspaces, runs=False)

    def __str__(self) -> str:
        if self.largest is None:
            return str(self.report)
        needs = f"at least {bytes_text(self.largest.floor)}, and {bytes_text(self.largest.taken_unplanned)}"
        return f"{self.report}\nthe largest batch needs {needs} with everything kept"


def _report_of(name: str, step: StepPlans, options: Options) -> Report:
    """The report of the plans that these options ask for; raises `BudgetError` if there are none."""
    limit = None
    if options.budget is None:
        choice = step.alone(options)
    else:
        limit = step.limit(options.budget)
        if limit is not None:
            step.require_room(options.budget, limit)
        choice = step.chosen(limit)
    graphs = [variant.captured for variant in step.variants(choice)]
    if not step.has_loss:
        last = graphs[-1]
        noted = dataclasses.replace(last, notes=(*last.notes, LOSS_OUTSIDE))
        graphs = [noted if graph is last else graph for graph in graphs]
    return report_of(name, graphs, options, program=step.program(choice, limit))


def _total_of(plans: Sequence[Plan], options: Options) -> int:
    return allocated_bytes(plans, options.resident)
