"""The suite `fast` as people read it."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.fast import FastSuite, FirstStep, Outcome
from benchmarks.table import machine_section, markdown_row, spread_text
from encore.units import bytes_text, seconds_text

COLUMNS = ("workload", "system", "step", "/ eager", "/ torch.compile", "peak", "predicted", "gradient error")
FIRST_COLUMNS = ("system", "time steps", "caches", "first step", "capture", "plan", "compile", "first run", "kernels")
READING = """\
Eager PyTorch, `torch.compile` (its defaults) and Encore run in one process for each workload, in turns, on the same
seed and batch; a step is forward and backward. The ratios are medians of the rounds, each of a system's step time over
another's in the same round, that to eager with the lowest and the highest round, "within noise" where these are further
apart than the median is from 1. **Peak** is what the allocator reports for one step; **predicted** is what Encore said
before it. **Gradient error** is the distance of all gradients from those of a float64 copy of the model, relative to
their size; a system that draws its own dropout masks has none. First steps are those of the translator, each in a
fresh process."""


def cells(workload: str, found: Outcome) -> tuple[str, ...]:
    return (
        workload,
        found.system,
        seconds_text(found.seconds),
        "1.00" if found.system == "eager" else spread_text(found.against_eager, *found.spread),
        f"{found.against_compile:.2f}",
        bytes_text(found.peak),
        "" if found.predicted is None else bytes_text(found.predicted),
        "own draws" if found.own_draws else f"{found.gradient_error:.1e}",
    )


def first_cells(found: FirstStep) -> tuple[str, ...]:
    stages = [seconds_text(found.stages[stage]) if found.stages else "" for stage in FIRST_COLUMNS[4:8]]
    return (
        found.system, str(found.steps), found.cache, seconds_text(found.seconds), *stages,
        str(found.kernels) if found.kernels else "",
    )  # fmt: skip


def _rows(suite: FastSuite) -> list[tuple[str, ...]]:
    return [cells(workload, outcome) for workload, outcomes in suite.outcomes.items() for outcome in outcomes]


def render(suite: FastSuite) -> str:
    """Two tables for a terminal."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=140, color_system=None, highlight=False)
    for columns, rows in ((COLUMNS, _rows(suite)), (FIRST_COLUMNS, [first_cells(one) for one in suite.first_steps])):
        console.print(_table(columns, rows))
        console.print()
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position > 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def page(suite: FastSuite) -> str:
    """`docs/benchmarks-fast.md`."""
    lines = ["# Fused kernels beside eager and `torch.compile`", ""]
    lines += ["Written by `python -m benchmarks fast --docs`.", "", *READING.splitlines(), ""]
    for columns, rows in ((COLUMNS, _rows(suite)), (FIRST_COLUMNS, [first_cells(one) for one in suite.first_steps])):
        lines += [markdown_row(columns), markdown_row(["---"] * len(columns)), *(markdown_row(row) for row in rows), ""]
    lines += [f"- {suite.rounds} rounds a workload, after warm-up", ""]
    lines += machine_section(suite.machine, suite.seconds)
    return "\n".join(lines)
