"""The suite `bptt` as people read it."""

from __future__ import annotations

from benchmarks.bptt import LOOP, SYSTEMS, BpttSuite, Outcome
from benchmarks.markdown import markdown_table, suite_page
from benchmarks.offload import KEPT, OffloadRow
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text

COLUMNS = ("system", "steps", "peak", "process", "a step", "/ loop", "forwards a step", "predicted", "gradients")
STALL_WITHIN = 0.2
"""How far from the measured stall the predicted one may be."""
REVOLVE, DISK = "encore.scan, Revolve", "encore.scan, disk"
READING = """\
An LSTM cell, forward and backward over the whole sequence, on one batch. **Peak** is what the allocator reports above
what was there before, with the gradients of the parameters in it; the budget of `encore.scan` is for states, tapes and
the work of one step. Over the longest sequences it is measured to disk alone; **process** is by how much the process
grew at most, with Python and what the allocator keeps for later. **A step** is the time of all of forward and backward
over the number of steps, the median of several runs where they are short, **/ loop** that over the loop written out
where it was run. **Forwards a step** counts how often a step is run, and **predicted** what the schedule said before;
to disk, a state that leaves late because the disk is busy changes the count a little. **Gradients** is the largest
difference from the first system of the same length. `encore.scan` runs Revolve over blocks of steps, as long as saves
the most runs in the budget; the published schedule has a step a tape, and its counts are those of the closed formula of
Griewank and Walther: r n - C(s + r, r - 1) runs without a tape. Where the package `checkpoint_schedules` is installed,
the runs along its own schedule are counted, too."""

OFFLOADED = (
    "network", "way", "peak", "predicted", "step", "/ as it is", "predicted", "moved", "stands still", "predicted",
    "gradients",
)  # fmt: skip
READING_OFFLOADED = """\
`tiers="disk"` on whole networks, in the eager lowering. **Recomputing** is at the lowest peak that recomputing alone
can reach, **with a disk** within that same peak with every method allowed, **a disk alone** at its own lowest peak.
**Stands still** is how long a step's thread waits for bytes on their way, by the tier's clock; **predicted** follows
what it predicts: here, what all waits of the schedule come to in a model of one channel next to the operators,
before the first of these steps, by a planner that had seen others on this disk."""


def cells(found: Outcome, suite: BpttSuite) -> tuple[str, ...]:
    loop = next((one for one in suite.of(LOOP) if one.steps == found.steps), None)
    return (
        found.system,
        f"{found.steps:,}",
        "-" if found.peak is None else bytes_text(found.peak),
        bytes_text(found.resident),
        f"{found.seconds * 1e6:.0f} us",
        "-" if loop is None else f"{found.seconds / loop.seconds:.2f}",
        f"{found.forwards:.2f}",
        "-" if found.predicted_forwards is None else f"{found.predicted_forwards:.2f}",
        "identical" if found.gradient_difference == 0 else f"{found.gradient_difference:.1e}",
    )


def offloaded_cells(row: OffloadRow, suite: BpttSuite) -> tuple[str, ...]:
    kept = next(one for one in suite.offloaded if one.workload == row.workload and one.system == KEPT)
    moves = row.moved > 0
    return (
        row.workload,
        row.system,
        bytes_text(row.peak),
        bytes_text(row.predicted_peak),
        seconds_text(row.seconds),
        f"{row.seconds / kept.seconds:.2f}",
        seconds_text(row.predicted_seconds) if row.predicted_seconds else "-",
        bytes_text(row.moved) if moves else "-",
        seconds_text(row.stall) if moves else "-",
        seconds_text(row.predicted_stall) if moves else "-",
        "identical" if row.gradient_difference == 0 else f"{row.gradient_difference:.1e}",
    )


def summary(suite: BpttSuite) -> list[str]:
    """The figures in a sentence each."""
    disk, revolve = suite.of(DISK), {outcome.steps: outcome for outcome in suite.of(REVOLVE)}
    peaks, seconds = [one.peak for one in disk if one.peak is not None], [one.seconds for one in disk]
    faster = [f"{revolve[one.steps].seconds / one.seconds:.2f}x at {one.steps:,}" for one in disk]
    growing = [f"{one.seconds * 1e6:.0f} us at {one.steps:,}" for one in suite.of(REVOLVE)]
    scanned = [one for one in suite.outcomes if one.predicted_forwards is not None]
    exact = sum(one.forwards == one.predicted_forwards for one in scanned)
    punctual = [one for one in scanned if not one.late]
    held = sum(one.forwards == one.predicted_forwards for one in punctual)
    published = [
        f"{suite.counted[steps]:.4f} counted and {forwards:.4f} by the formula"
        + ("" if suite.theirs is None else f" and {suite.theirs[steps]:.4f} by checkpoint_schedules")
        + f" at {steps:,}"
        for steps, forwards in suite.published.items()
    ]
    dropped = max(suite.dropout_differences.values())
    return [
        f"a budget of {bytes_text(suite.budget)} (64 states of {bytes_text(suite.state_bytes)}); the parameters' "
        f"gradients are {bytes_text(suite.gradient_bytes)}",
        f"to disk, over all lengths: peaks within {max(peaks) / min(peaks) - 1:.1%} of each other, times a step within "
        f"{max(seconds) / min(seconds) - 1:.1%}",
        f"Revolve's time over that to disk: {', '.join(faster)}",
        f"a step of Revolve: {', '.join(growing)}",
        f"runs of a step as predicted, exactly, in {exact} of {len(scanned)} scans, and in {held} of the "
        f"{len(punctual)} without a state that left late",
        f"Revolve as published (64 states, a step a tape), runs of a step over steps: {', '.join(published)}",
        "with dropout in the step, gradients of all ways are "
        + ("identical" if dropped == 0 else f"up to {dropped:.1e} apart"),
        *stall_verdicts(suite),
    ]


def stall_verdicts(suite: BpttSuite) -> list[str]:
    """How close the predicted stall of everything that moves is to the measured one."""
    found = []
    for row in suite.offloaded:
        if row.moved and row.stall:
            ratio = row.predicted_stall / row.stall
            within = "within" if abs(ratio - 1) <= STALL_WITHIN else "NOT within"
            found.append(
                f"{row.workload}, {row.system}: the predicted stall is {ratio:.2f} of the measured, {within} "
                f"{STALL_WITHIN:.0%} of it"
            )
        elif row.moved:
            found.append(
                f"{row.workload}, {row.system}: {seconds_text(row.predicted_stall)} of stall predicted, none met"
            )
    return found


def _rows(suite: BpttSuite) -> list[tuple[str, ...]]:
    ordered = sorted(suite.outcomes, key=lambda one: (one.steps, list(SYSTEMS).index(one.system)))
    return [cells(outcome, suite) for outcome in ordered]


def render(suite: BpttSuite) -> str:
    """The table for a terminal, and what it comes to."""
    tables = [terminal_table(COLUMNS, _rows(suite), words=1), "", *summary(suite)]
    if suite.offloaded:
        tables += ["", terminal_table(OFFLOADED, _offloaded(suite), words=2)]
    return "\n".join(tables)


def _offloaded(suite: BpttSuite) -> list[tuple[str, ...]]:
    return [offloaded_cells(row, suite) for row in suite.offloaded]


def page(suite: BpttSuite) -> str:
    """`docs/benchmarks-bptt.md`."""
    sections = [*READING.splitlines(), "", "![Time and memory by length](benchmarks-bptt.png)", ""]
    sections += [*markdown_table(COLUMNS, _rows(suite)), "", *(f"- {sentence}" for sentence in summary(suite)), ""]
    if suite.offloaded:
        sections += ["## Activations on disk", "", *READING_OFFLOADED.splitlines(), ""]
        sections += [*markdown_table(OFFLOADED, _offloaded(suite)), ""]
    title = "Backpropagation through time"
    return suite_page(title, "bptt", suite.quick, sections, suite.machine, suite.seconds)
