"""The suite `spine` as a table for a terminal and as a page."""

from __future__ import annotations

from benchmarks.markdown import markdown_row, suite_page
from benchmarks.spine import Comparison, SpineSuite
from encore.compare.table import spread_text
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text

COLUMNS = (
    "workload", "operators", "eager peak", "Encore peak", "predicted", "error", "eager step", "Encore step",
    "ratio (spread)", "first step", "capture", "plan", "simulator", "gradients",
)  # fmt: skip
READING = """\
Eager PyTorch and Encore's eager lowering run in one process, in interleaved rounds, on the same seed and batch; a step
is forward and backward. **Peaks** are what the allocator reports for one step above what was alive before it;
**predicted** is what Encore predicted before the step ran, and **error** how far that lies above what was measured.
**Ratio** is Encore's step time over eager's: the median of the rounds, with the lowest and the highest round, "within
noise" where these are further apart than the median is from 1. **First step** is the first one through Encore with
everything in it; **capture** is the trace of the joint graph, **plan** is everything from that graph to callables,
**simulator** one walk over the finished schedule. **Gradients** is the largest absolute difference between the two
sides."""


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


def render(suite: SpineSuite) -> str:
    """The table for a terminal, a column a workload: fourteen facts in a row fit no screen."""
    headings, *rows = list(zip(COLUMNS, *(cells(found) for found in suite.comparisons), strict=True))
    return "\n".join([terminal_table(headings, rows, words=1), *notes(suite)])


def notes(suite: SpineSuite) -> list[str]:
    """What a reader must know before quoting a number."""
    lines = [f"{found.workload}: plain PyTorch for {part}" for found in suite.comparisons for part in found.plain]
    if suite.quick:
        lines.append("tiny sizes: times are those of operator calls, not of arithmetic")
    return lines


def page(suite: SpineSuite) -> str:
    """`docs/benchmarks-spine.md`."""
    sections = [
        *READING.splitlines(),
        "",
        markdown_row(COLUMNS),
        markdown_row(["---", *["---:"] * (len(COLUMNS) - 1)]),
        *(markdown_row(cells(found)) for found in suite.comparisons),
        "",
        *(f"- {note}" for note in notes(suite)),
        f"- {suite.comparisons[0].rounds} rounds a workload, after warm-up",
        "",
    ]
    title = "The eager lowering compared with eager itself"
    return suite_page(title, "spine", suite.quick, sections, suite.machine, suite.seconds)
