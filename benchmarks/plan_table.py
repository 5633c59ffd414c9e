"""The suite `plan` as people read it."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.budgets import BudgetOutcome
from benchmarks.markdown import markdown_table, suite_page
from benchmarks.plan import PlanSuite
from benchmarks.planning import PlanningTime
from encore.compare.table import spread_text
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text

BUDGET_COLUMNS = (
    "workload", "budget", "predicted", "measured", "kept", "predicted overhead", "/ everything kept", "gradients",
)  # fmt: skip
PLANNING_COLUMNS = ("workload", "joint nodes", "operators", "Encore", "PyTorch", "Encore / PyTorch")
BUDGETS = """\
Ten budgets from the floor to what the step takes with everything kept, each a compilation of its own. Budgets and peaks
are without the resident bytes (parameters, buffers, inputs). **/ everything kept** is the step time over that of the
plan that keeps everything, the median of the rounds with the lowest and the highest one, "within noise" where these are
further apart than the median is from 1; **gradients** is the distance from that plan's."""
PLANNING = """\
From the traced joint graph to the chosen plan, compared with `min_cut_rematerialization_partition` on the same
graph."""


def budget_cells(workload: str, found: BudgetOutcome) -> tuple[str, ...]:
    return (
        workload,
        bytes_text(found.budget),
        bytes_text(found.predicted),
        bytes_text(found.measured),
        "yes" if found.kept else "NO",
        f"{found.predicted_overhead:.1%}",
        spread_text(found.against_kept, *found.spread),
        f"{found.gradient_difference:.1e}",
    )


def planning_cells(found: PlanningTime) -> tuple[str, ...]:
    return (
        found.workload,
        f"{found.nodes:,}",
        f"{found.operators:,}",
        seconds_text(found.encore),
        seconds_text(found.pytorch),
        f"{found.encore / found.pytorch:.2f}",
    )


def summary(suite: PlanSuite) -> list[str]:
    """The figures in a sentence each."""
    found = [outcome for outcomes in suite.budgets.values() for outcome in outcomes]
    kept = sum(outcome.kept for outcome in found)
    furthest = max((outcome.predicted / outcome.measured - 1 for outcome in found), key=abs, default=0.0)
    pairs = [pair for outcomes in suite.budgets.values() for pair in pairwise(outcomes)]
    rising = sum(less.predicted <= more.predicted for less, more in pairs)
    falling = sum(less.predicted_overhead >= more.predicted_overhead for less, more in pairs)
    return [
        f"{kept} of {len(found)} budgets kept; the prediction furthest from the measured peak is {furthest:+.2%} off",
        f"a larger budget: a peak as high or higher in {rising}, an overhead as low or lower in {falling} "
        f"of {len(pairs)} cases",
    ]


def _budget_rows(suite: PlanSuite) -> list[tuple[str, ...]]:
    return [budget_cells(workload, outcome) for workload, outcomes in suite.budgets.items() for outcome in outcomes]


def render(suite: PlanSuite) -> str:
    """Tables for a terminal, and what they come to."""
    budgets = terminal_table(BUDGET_COLUMNS, _budget_rows(suite), words=1)
    planning = terminal_table(PLANNING_COLUMNS, [planning_cells(found) for found in suite.planning], words=1)
    return "\n".join([budgets, "", *summary(suite), "", PLANNING, "", planning])


def page(suite: PlanSuite) -> str:
    """`docs/benchmarks-plan.md`."""
    sections = [*BUDGETS.splitlines(), "", "![Budgets and peaks](benchmarks-plan.png)", ""]
    sections += [*markdown_table(BUDGET_COLUMNS, _budget_rows(suite)), ""]
    sections += [*(f"- {line}" for line in summary(suite)), f"- {suite.rounds} rounds a budget", ""]
    sections += ["## Time to plan", "", PLANNING, ""]
    sections += [*markdown_table(PLANNING_COLUMNS, [planning_cells(found) for found in suite.planning]), ""]
    return suite_page("Budgets", "plan", suite.quick, sections, suite.machine, suite.seconds)
