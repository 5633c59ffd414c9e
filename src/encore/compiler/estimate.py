"""`Estimate`: a step that has not run, and the budgets that it would fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encore.compiler.session import CapturedGraph
from encore.compiler.summary import report_of
from encore.errors import BudgetError
from encore.options import Budget, Options, make_options, parse_budget
from encore.plan import Plan, choose, stack_plans, worth_having
from encore.report.points import Curve
from encore.report.report import Prediction, Report


@dataclass(frozen=True)
class Estimate:
    """A step that has not run: what it would take, and which budgets it would fit."""

    report: Report
    captured: tuple[CapturedGraph, ...]
    options: Options

    def beside(self, *, resident: int = 0, optimizer: Any = None) -> Estimate:
        """The same step with so many more resident bytes, or with an optimizer's state, which count in budgets, too."""
        counted = make_options({"resident": resident, "optimizer": optimizer}).resident
        options = dataclasses.replace(self.options, resident=counted)
        report = report_of(self.report.name, self.captured, options)
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
        """Return whether there is a plan within the budget."""
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
        return budget.of_step(_total_of(unplanned, self.options))

    def __str__(self) -> str:
        return str(self.report)


def _total_of(plans: Sequence[Plan], options: Options) -> int:
    return stack_plans(plans).total + options.resident
