"""The suite `fast` as people read it."""

from __future__ import annotations

from benchmarks.fast import FastSuite, FirstStep, Outcome
from benchmarks.markdown import markdown_table, suite_page
from encore.compare.table import spread_text
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text

COLUMNS = ("workload", "system", "step", "/ eager", "/ torch.compile", "peak", "predicted", "gradient error")
FIRST_COLUMNS = ("system", "time steps", "caches", "first step", "capture", "plan", "compile", "first run", "kernels")
READING = """\
Eager PyTorch, `torch.compile` (its defaults) and Encore run in one process for each workload, interleaved, on the same
seed and batch; a step is forward and backward. The ratios are medians of the rounds, each of a system's step time over
another's in the same round, that to eager with the lowest and the highest round, "within noise" where these are further
apart than the median is from 1. **Peak** is what the allocator reports for one step; **predicted** is what Encore
predicted. **Gradient error** is the distance of all gradients from those of a float64 copy of the model, relative to
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


def _first_rows(suite: FastSuite) -> list[tuple[str, ...]]:
    return [first_cells(one) for one in suite.first_steps]


def render(suite: FastSuite) -> str:
    """Two tables for a terminal."""
    steps = terminal_table(COLUMNS, _rows(suite), words=2)
    return f"{steps}\n\n{terminal_table(FIRST_COLUMNS, _first_rows(suite), words=2)}"


def page(suite: FastSuite) -> str:
    """`docs/benchmarks-fast.md`."""
    sections = [*READING.splitlines(), "", *markdown_table(COLUMNS, _rows(suite)), ""]
    sections += [
        *markdown_table(FIRST_COLUMNS, _first_rows(suite)),
        "",
        f"- {suite.rounds} rounds a workload, after warm-up",
        "",
    ]
    title = "Fused kernels compared with eager and `torch.compile`"
    return suite_page(title, "fast", suite.quick, sections, suite.machine, suite.seconds)
