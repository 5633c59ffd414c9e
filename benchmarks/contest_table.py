"""The suites of `contest` as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contest import (
    AS_FAST,
    AT_ITS_PEAK,
    BOTH,
    BY_HAND,
    DEFAULT,
    ENCODING,
    FLOOR,
    METHODS,
    RECOMPUTING,
    WITHIN_BUDGET,
    ContestSuite,
)
from benchmarks.markdown import markdown_table, suite_page
from encore.compare.outcome import Outcome
from encore.compare.table import difference_text, ratio_text, reason_text
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text

COLUMNS = (
    "workload", "system", "peak", "less than eager", "predicted", "step", "/ eager", "predicted step", "plan",
    "first step", "gradients",
)  # fmt: skip
TITLES = {
    "echo": "Encore compared with what people would use instead",
    "gist": "Image classifiers",
    "rnn-workloads": "Recurrent networks",
}
READING = """\
All systems run in one process for each workload, interleaved, on the same seed and batch; a step is forward and
backward. **Peak** is what the allocator reports for one step, gradients included; **predicted** is what Encore
predicted. **/ eager** is the step time over eager's in the same round: the median of the rounds, with the lowest and
the highest round, "within noise" where these are further apart than the median is from 1. **Predicted step** is what
Encore predicted for a step, over the quietest step of all rounds. **Plan** is the time spent on planning in the first
step (measuring operators for the first time included). **Gradients** is the distance of all gradients from eager's,
relative to their size, "far off" beyond a tenth; where a model has dropout, a system that draws masks of its own has
none."""


def cells(workload: str, found: Outcome) -> tuple[str, ...]:
    if not found.ran:
        return (workload, found.system, reason_text(found), *[""] * (len(COLUMNS) - 3))
    return (
        workload,
        found.system,
        bytes_text(found.peak),
        f"{found.reduction:.2f}x",
        "" if found.predicted is None else bytes_text(found.predicted),
        seconds_text(found.seconds),
        ratio_text(found),
        "" if found.predicted_seconds is None else f"{found.predicted_seconds / found.quietest:.2f}",
        "" if found.plan_seconds is None else seconds_text(found.plan_seconds),
        seconds_text(found.first_step),
        difference_text(found),
    )


def summary(suite: ContestSuite) -> list[str]:
    """The figures in a sentence each."""
    lines = []
    for label in (AS_FAST, DEFAULT, *METHODS.get(suite.suite, {})):
        picked = [one for outcomes in suite.outcomes.values() for one in outcomes if one.system == label]
        if ran := [one for one in picked if one.ran]:
            mean = sum(one.reduction for one in ran) / len(ran)
            times = ", ".join(f"{one.against_eager:.2f}" for one in ran)
            best = max(one.reduction for one in ran)
            lines.append(f"{label}: {mean:.2f}x less on average, {best:.2f}x at most, at {times} of eager's time")
    lines += [line for workload, outcomes in suite.outcomes.items() if (line := both_against_each(workload, outcomes))]
    for workload, outcomes in suite.outcomes.items():
        rest = {one.system: one.peak - suite.gradients[workload] for one in outcomes if one.ran}
        if FLOOR not in rest:
            continue
        budgets = [size for system, size in rest.items() if system.startswith(WITHIN_BUDGET)]
        against = [f"{rest[FLOOR] / rest[BY_HAND]:.2f} of the checkpoints'"] if BY_HAND in rest else []
        against += [f"{rest[FLOOR] / min(budgets):.2f} of {WITHIN_BUDGET}'s at its best"] if budgets else []
        if against:
            lines.append(f"{workload}: without the gradients, Encore's floor is {', '.join(against)}")
    return lines


def both_against_each(workload: str, outcomes: Sequence[Outcome]) -> str:
    """Encoding and recomputing together compared with the better of the two: in the same time, and in the same
    memory."""
    ran = {one.system: one for one in outcomes if one.ran}
    if not {ENCODING, RECOMPUTING, BOTH, AT_ITS_PEAK} <= ran.keys():
        return ""
    better = min((ran[ENCODING], ran[RECOMPUTING]), key=lambda one: (one.peak, one.quietest))
    both, at_its_peak = ran[BOTH], ran[AT_ITS_PEAK]
    which = "encoding" if better.system == ENCODING else "recomputing"
    return (
        f"{workload}: the better one alone, {which}, holds {bytes_text(better.peak)}; both in the same time "
        f"{bytes_text(both.peak)} ({both.peak / better.peak:.3f}); both in its memory take "
        f"{at_its_peak.quietest / better.quietest:.3f} of its time"
    )


def _rows(suite: ContestSuite) -> list[tuple[str, ...]]:
    return [cells(workload, outcome) for workload, outcomes in suite.outcomes.items() for outcome in outcomes]


def render(suite: ContestSuite) -> str:
    """A table for a terminal, and what it comes to."""
    return "\n".join([terminal_table(COLUMNS, _rows(suite), words=2), "", *summary(suite)])


def page(suite: ContestSuite) -> str:
    """`docs/benchmarks-echo.md`, `-gist.md` and `-rnn-workloads.md`."""
    sections = [*READING.splitlines(), ""]
    sections += [f"![What each system saves, and at which price](benchmarks-{suite.suite}.png)", ""]
    sections += [*markdown_table(COLUMNS, _rows(suite)), "", *(f"- {line}" for line in summary(suite)), ""]
    sections += [f"- {suite.rounds} rounds a workload, after warm-up", ""]
    return suite_page(TITLES[suite.suite], suite.suite, suite.quick, sections, suite.machine, suite.seconds)
