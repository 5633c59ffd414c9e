"""The suite of budgets: what it tells, and one sweep for real."""

from __future__ import annotations

import json

import pytest

from benchmarks import plots, results
from benchmarks.budgets import BUDGETS, BudgetOutcome, sweep
from benchmarks.plan import PlanSuite
from benchmarks.plan_table import (
    BUDGET_COLUMNS,
    PLANNING_COLUMNS,
    budget_cells,
    page,
    planning_cells,
    render,
    summary,
)
from benchmarks.planning import PlanningTime, planning_time
from benchmarks.workloads import TINY_SIZES, tiny
from encore.compare.plots import png
from encore.machine import this_machine
from support.json_schema import violations

MIB = 2**20


def suite() -> PlanSuite:
    found = (
        BudgetOutcome(10 * MIB, 10 * MIB, 10 * MIB, 0.4, 1.5, (1.4, 1.6), 0.0),
        BudgetOutcome(20 * MIB, 19 * MIB, 19 * MIB, 0.1, 1.2, (1.0, 1.3), 1e-7),
        BudgetOutcome(30 * MIB, 30 * MIB, 31 * MIB, 0.0, 1.0, (0.9, 1.1), 0.0),
    )
    planning = PlanningTime("nmt", 10_000, 7_500, 2.5, {"facts": 0.5, "verify": 0.1, "plan": 1.9}, 5.0)
    return PlanSuite(this_machine(), True, 2, {"lm": found}, (planning,))


def test_what_it_comes_to_is_told_in_sentences() -> None:
    assert summary(suite()) == [
        "2 of 3 budgets kept; the prediction furthest from the measured peak is -3.23% off",
        "a larger budget: a peak as high or higher in 2, an overhead as low or lower in 2 of 2 cases",
    ]


def test_a_broken_budget_is_shouted() -> None:
    rows = [budget_cells("lm", one) for one in suite().budgets["lm"]]
    assert all(len(row) == len(BUDGET_COLUMNS) for row in rows)
    assert [row[4] for row in rows] == ["yes", "yes", "NO"]
    assert [row[6] for row in rows] == [
        "1.50 (1.40-1.60)", "1.20 (1.00-1.30), within noise", "1.00 (0.90-1.10), within noise",
    ]  # fmt: skip


def test_the_time_to_plan_is_told_beside_that_of_pytorch() -> None:
    (planning,) = suite().planning
    assert planning_cells(planning) == ("nmt", "10,000", "7,500", "2.50 s", "5.00 s", "0.50")
    assert len(PLANNING_COLUMNS) == len(planning_cells(planning))
    assert "10,000" in render(suite())
    assert "| nmt | 10,000 | 7,500 | 2.50 s | 5.00 s | 0.50 |" in page(suite())
    told = json.loads(suite().to_json())
    assert violations(told, results.SUITES["plan"].found.schema()) == []
    assert len(told["budgets"]["lm"]) == 3


def test_budgets_are_drawn() -> None:
    assert png(plots.budgets(suite().budgets)).startswith(b"\x89PNG")


@pytest.mark.slow
def test_planning_is_timed_on_the_graph_that_pytorch_splits() -> None:
    found = planning_time(lambda: tiny("transformer"))
    assert found.nodes > found.operators > 100
    assert found.encore == sum(found.stages.values()) > 0
    assert found.pytorch > 0


@pytest.mark.slow
def test_ten_budgets_are_kept() -> None:
    found = sweep("transformer", TINY_SIZES["transformer"], rounds=1)
    assert len(found) == BUDGETS
    assert all(one.kept for one in found)
    assert all(abs(one.predicted / one.measured - 1) <= 0.01 for one in found)
    overheads = [one.predicted_overhead for one in found]
    assert overheads == sorted(overheads, reverse=True)
    assert found[0].measured < found[-1].measured
