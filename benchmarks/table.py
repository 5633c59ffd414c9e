"""The benchmark as people read it: a table in the terminal, a page in the documentation."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.compare import Comparison
from benchmarks.suite import Suite
from encore.machine import Machine, machine_rows
from encore.units import bytes_text, seconds_text

WIDTH = 160
COLUMNS = (
    "workload", "operators", "eager peak", "Encore peak", "predicted", "error", "eager step", "Encore step",
    "ratio (spread)", "first step", "capture", "plan", "simulator", "gradients",
)  # fmt: skip
READING = """\
Eager PyTorch and Encore's eager lowering run in one process, in turns, on the same seed and batch; a step is forward
and backward.
**Peaks** are what the allocator reports for one step above what was alive before it; **predicted** is what Encore said
before the step ran, and **error** how far that lies above what was measured. **Ratio** is Encore's step time over
eager's: the median of the rounds, with the lowest and the highest round, "within noise" where these are further apart
than the median is from 1. **First step** is the first one through
Encore with everything in it; **capture** is the trace of the joint graph, **plan** is everything from that graph to
callables, **simulator** one walk over the finished schedule. **Gradients** is the largest absolute difference between
the two sides."""


def cells(found: Comparison) -> tuple[str, ...]:
    """One comparison, in the order of `COLUMNS`."""
    return (
        found.workload if found.graphs == 1 else f"{found.workload} ({found.graphs} graphs)",
        f"{found.operators:,}",
        bytes_text(found.eager_peak),
        bytes_text(found.encore_peak),
        bytes_text(found.predicted_peak),
        f"{found.prediction_error:+.2%}",
        seconds_text(found.eager_seconds),
        seconds_text(found.encore_seconds),
        spread_text(found.ratio, found.lowest_ratio, found.highest_ratio),
        seconds_text(found.first_step_seconds),
        seconds_text(found.capture_seconds),
        seconds_text(found.plan_seconds),
        seconds_text(found.simulator_seconds),
        "identical" if found.gradient_difference == 0 else f"{found.gradient_difference:.1e}",
    )


def render(suite: Suite) -> str:
    """The table for a terminal, a column a workload: fourteen facts side by side fit no screen."""
    table = Table(box=None, pad_edge=False)
    rows = list(zip(COLUMNS, *(cells(found) for found in suite.comparisons), strict=True))
    for position, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if position else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None, highlight=False).print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    return "\n".join([*lines, *notes(suite)])


def notes(suite: Suite) -> list[str]:
    """What a reader must know before quoting a number."""
    told = [f"{found.workload}: plain PyTorch for {part}" for found in suite.comparisons for part in found.plain]
    if suite.quick:
        told.append("tiny sizes: times are those of operator calls, not of arithmetic")
    return told


def page(suite: Suite) -> str:
    """`docs/benchmarks-spine.md`."""
    lines = [
        "# The eager lowering beside eager itself",
        "",
        f"Written by `python -m benchmarks spine{' --quick' if suite.quick else ''} --docs`.",
        "",
        *READING.splitlines(),
        "",
        markdown_row(COLUMNS),
        markdown_row(["---", *["---:"] * (len(COLUMNS) - 1)]),
        *(markdown_row(cells(found)) for found in suite.comparisons),
        "",
        *(f"- {note}" for note in notes(suite)),
        f"- {suite.comparisons[0].rounds} rounds a workload, after warm-up",
        "",
        *machine_section(suite.machine, suite.seconds),
    ]
    return "\n".join(lines)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_row(columns), markdown_row(["---"] * len(columns)), *map(markdown_row, rows)]


def markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def spread_text(median: float, lowest: float, highest: float) -> str:
    """A ratio with its lowest and highest round: '0.91 (0.88-0.97)'. Where the rounds lie further apart than the median
    is from 1, that is said."""
    noise = ", within noise" if highest - lowest > abs(median - 1) else ""
    return f"{median:.2f} ({lowest:.2f}-{highest:.2f}){noise}"


def machine_section(machine: Machine, seconds: float) -> list[str]:
    """How a page ends: commit, machine and day of its figures, and how long they took."""
    rows = [*machine_rows(machine), ("the suite took", seconds_text(seconds))]
    return ["## Commit and machine", "", *(f"- {name}: {value}" for name, value in rows), ""]
