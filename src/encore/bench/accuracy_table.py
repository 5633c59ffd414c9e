"""The suite `accuracy` as people read it."""

from __future__ import annotations

from encore.bench.accuracy import EAGER, AccuracySuite, Training
from encore.bench.table import machine_section, markdown_table, terminal_table
from encore.units import bytes_text

COLUMNS = ("workload", "variant", "loss at the end", "score", "off eager's loss", "peak", "less than eager")
READING = """\
Every variant trains from the same weights on the same batches. **Encore** keeps activations as codes between forward
and backward and computes in full precision; **at once** rounds every module's output where it is computed, a cell's
state included, so that forward goes on with it. **Loss at the end** is the mean of the last steps, **score** the
workload's metrics on data that no batch contained, **off eager's loss** the largest relative distance at any step,
**peak** what the allocator reports for one step.

**Eager, one rounding apart** is eager again with one weight changed by its last bit. Training is chaotic: a difference
in one rounding grows with every step, so this row is what two correct runs differ by. A variant whose distance from
eager is of that size computes as well as eager does; lossless codes change no value that backward reads, only the order
of sums."""


def cells(workload: str, found: Training, eager_peak: int) -> tuple[str, ...]:
    score = ", ".join(f"{name} {value:.3f}" for name, value in found.score.items())
    return (
        workload,
        found.variant,
        f"diverged at step {len(found.losses)}" if found.diverged else f"{found.loss:.4f}",
        score,
        f"{found.off:.1e}" if found.variant != EAGER else "",
        bytes_text(found.peak),
        f"{eager_peak / found.peak:.2f}x",
    )


def _rows(suite: AccuracySuite) -> list[tuple[str, ...]]:
    rows = []
    for workload, trainings in suite.trainings.items():
        eager_peak = next(one.peak for one in trainings if one.variant == EAGER)
        rows += [cells(workload, one, eager_peak) for one in trainings]
    return rows


def render(suite: AccuracySuite) -> str:
    """A table for a terminal."""
    return terminal_table(COLUMNS, _rows(suite), words=2)


def page(suite: AccuracySuite) -> str:
    """`docs/benchmarks-accuracy.md`."""
    quick = " --quick" if suite.quick else ""
    lines = ["# Learning with encoded feature maps", "", f"Written by `encore bench accuracy{quick} --docs`.", ""]
    lines += [*READING.splitlines(), "", "![The loss of every variant](benchmarks-accuracy.png)", ""]
    lines += [*markdown_table(COLUMNS, _rows(suite)), "", f"- {suite.steps} steps a training", ""]
    lines += machine_section(suite.machine, suite.seconds)
    return "\n".join(lines)
