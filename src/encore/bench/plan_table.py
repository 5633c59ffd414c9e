"""The suite `plan` as people read it."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from encore.bench.plan import PlanOutcome, PlanSuite
from encore.bench.planning import PlanningTime
from encore.bench.table import machine_rows, markdown_row, seconds_text
from encore.units import bytes_text

COLUMNS = (
    "workload", "system", "peak", "less than eager", "predicted", "step", "/ eager", "predicted step", "plan",
    "first step", "gradients",
)  # fmt: skip
PLANNING_COLUMNS = ("workload", "joint nodes", "operators", "Encore", "PyTorch", "Encore / PyTorch")
OWN_DRAWS = 0.1
"""A distance beyond this is no rounding: the system draws other dropout masks than eager does."""
READING = """\
All systems run in one process for each workload, in turns, on the same seed and batch; a step is forward and backward.
**Peak** is what the allocator reports for one step, gradients included; **predicted** is what Encore said before it.
**/ eager** is the median over the rounds of the step time over eager's in the same round. **Plan** is the time spent
on planning in the first step (measuring operators for the first time included). **Gradients** is the distance of all
gradients from eager's, relative to their size; a system that draws its own dropout masks has none."""

PLANNING = """\
From the traced joint graph to the chosen plan, beside `min_cut_rematerialization_partition` on the same graph."""


def cells(workload: str, found: PlanOutcome) -> tuple[str, ...]:
    if found.failure:
        return (workload, found.system, f"failed: {found.failure}", *[""] * (len(COLUMNS) - 3))
    return (
        workload,
        found.system,
        bytes_text(found.peak),
        f"{found.reduction:.2f}x",
        "" if found.predicted is None else bytes_text(found.predicted),
        seconds_text(found.seconds),
        f"{found.against_eager:.2f}",
        "" if found.predicted_seconds is None else seconds_text(found.predicted_seconds),
        "" if found.plan_seconds is None else seconds_text(found.plan_seconds),
        seconds_text(found.first_step),
        "own draws" if found.gradient_difference > OWN_DRAWS else f"{found.gradient_difference:.1e}",
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
    lines = []
    for label in ("Encore, as fast as eager", "Encore"):
        picked = [one for outcomes in suite.outcomes.values() for one in outcomes if one.system == label]
        if picked:
            mean = sum(one.reduction for one in picked) / len(picked)
            times = ", ".join(f"{one.against_eager:.2f}" for one in picked)
            best = max(one.reduction for one in picked)
            lines.append(f"{label}: {mean:.2f}x less on average, {best:.2f}x at most, at {times} of eager's time")
    for workload, outcomes in suite.outcomes.items():
        rest = {one.system: one.peak - suite.gradients[workload] for one in outcomes if not one.failure}
        floor = rest.get("Encore, budget='min'")
        budgets = [size for system, size in rest.items() if system.startswith("activation_memory_budget")]
        if floor is not None:
            against = f"{floor / rest['checkpoint per block']:.2f} of the checkpoints'"
            if budgets:
                against += f", {floor / min(budgets):.2f} of activation_memory_budget's at its best"
            lines.append(f"{workload}: without the gradients, Encore's floor is {against}")
    return lines


def _rows(suite: PlanSuite) -> list[tuple[str, ...]]:
    return [cells(workload, outcome) for workload, outcomes in suite.outcomes.items() for outcome in outcomes]


def render(suite: PlanSuite) -> str:
    """Tables for a terminal, and what they come to."""
    outcomes = _terminal(COLUMNS, _rows(suite), words=2)
    planning = _terminal(PLANNING_COLUMNS, [planning_cells(found) for found in suite.planning], words=1)
    return "\n".join([outcomes, "", *summary(suite), "", PLANNING, "", planning])


def _terminal(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table whose first columns are words, and the others figures."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=180, color_system=None, highlight=False)
    table = Table(box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position >= words else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def page(suite: PlanSuite) -> str:
    """`docs/benchmarks-plan.md`."""
    lines = ["# Recomputation beside what people would use instead", "", "Written by `encore bench plan --docs`.", ""]
    lines += [*READING.splitlines(), "", markdown_row(COLUMNS), markdown_row(["---"] * len(COLUMNS))]
    lines += [*(markdown_row(row) for row in _rows(suite)), "", *(f"- {line}" for line in summary(suite)), ""]
    lines += [f"- {suite.rounds} rounds a workload, after warm-up", "", "## Time to plan", "", PLANNING, ""]
    lines += [markdown_row(PLANNING_COLUMNS), markdown_row(["---"] * len(PLANNING_COLUMNS))]
    lines += [*(markdown_row(planning_cells(found)) for found in suite.planning), "", "## The machine", ""]
    lines += [*(f"- {name}: {value}" for name, value in machine_rows(suite.machine)), ""]
    return "\n".join(lines)
