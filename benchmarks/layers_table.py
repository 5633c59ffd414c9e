"""The suite `rnn` as people read it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.layers import PRODUCTS, THEIRS, LayerSuite, Outcome
from benchmarks.markdown import markdown_table, suite_page
from encore.compare.table import spread_text
from encore.rnn.tuning import TORCHS
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text

COLUMNS = ("layers", "system", "step", "speed", "/ products", "peak", "/ torch.nn's", "saved", "/ torch.nn's", "rounds",
           "layout")  # fmt: skip
READING = """\
Recurrent layers of `torch.nn` and of Encore in one process, interleaved; a step is forward and backward of the layers
alone. **Speed** is `torch.nn`'s time over this one's, the median of the rounds with the lowest and the highest one,
"within noise" where these are further apart than the median is from 1. **Products alone** are the step's
matrix products, each in its fastest operand order and with nothing in between: a limit; **/ products** is a step's time
over theirs. **Peak** is what the allocator reports for one step, gradients included; **saved** is what autograd keeps
between forward and backward without inputs and parameters. `packed` sequences have lengths from T down to T / 4. Cells
are one step; the input is as wide as the layer. All but the largest sizes were tuned first, as `encore tune` does it;
the fast form of a small LSTM may then be `torch.nn`'s own layer (*)."""


def cells(suite: LayerSuite, one: Outcome) -> tuple[str, ...]:
    theirs = suite.theirs(one.case)
    limit = [other for other in suite.outcomes if other.case == one.case and other.system == PRODUCTS]
    measured = one.system != PRODUCTS
    return (
        str(one.case),
        one.system,
        seconds_text(one.seconds),
        "1.00" if one.system == THEIRS else spread_text(one.speed, *one.spread),
        f"{one.seconds / limit[0].seconds:.2f}" if limit else "",
        bytes_text(one.peak) if measured else "",
        f"{one.peak / theirs.peak:.2f}" if measured else "",
        bytes_text(one.saved) if measured else "",
        f"{one.saved / theirs.saved:.2f}" if measured and theirs.saved else "",
        str(one.rounds),
        one.layout,
    )


def rows(suite: LayerSuite) -> list[tuple[str, ...]]:
    """All sizes but the grid's."""
    return [cells(suite, one) for one in suite.outcomes if one.case.group != "grid"]


def grid(suite: LayerSuite, system: str) -> dict[tuple[int, int, int], float]:
    """Speed by steps, batch and units."""
    found = [one for one in suite.of("grid") if one.system == system]
    return {(one.case.steps, one.case.batch, one.case.hidden): one.speed for one in found}


def left_to_torch(suite: LayerSuite, system: str) -> set[tuple[int, int, int]]:
    """Sizes of the grid, by steps, batch and units, that run `torch.nn`'s own layer."""
    found = [one for one in suite.of("grid") if one.system == system and one.layout == str(TORCHS)]
    return {(one.case.steps, one.case.batch, one.case.hidden) for one in found}


def grid_rows(suite: LayerSuite) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """A row for each stash, length and batch; a column for each number of units."""
    units = sorted({one.case.hidden for one in suite.of("grid")})
    found = []
    for system in ("fast", "lean"):
        speeds, theirs = grid(suite, system), left_to_torch(suite, system)
        for steps, batch in sorted({(steps, batch) for steps, batch, _ in speeds}):
            sizes = [(steps, batch, hidden) for hidden in units]
            texts = (f"{speeds[size]:.2f}x{'*' * (size in theirs)}" if size in speeds else "-" for size in sizes)
            found.append((system, f"T{steps}", f"B{batch}", *texts))
    return ("stash", "steps", "batch", *(f"H{hidden}" for hidden in units)), found


ATTENTION_COLUMNS = (
    "scores",
    "B, queries, keys, H",
    "saved",
    "written out",
    "peak",
    "written out",
    "time / written out",
)


def attention_cells(suite: LayerSuite) -> list[tuple[str, ...]]:
    """Scores as one operator compared with the formula written out."""
    return [
        (
            one.name,
            ", ".join(map(str, one.sizes)),
            *(bytes_text(size) for size in (one.saved, one.saved_eager, one.peak, one.peak_eager)),
            f"{one.time_ratio:.2f}",
        )
        for one in suite.attention
    ]


def summary(suite: LayerSuite) -> list[str]:
    """The figures in a sentence each."""
    lines = []
    for one in suite.outcomes:
        if one.case.group == "grid" or one.system in (THEIRS, PRODUCTS):
            continue
        theirs = suite.theirs(one.case)
        memory = f", {one.peak / theirs.peak:.2f} of its peak" + (
            f", {one.saved / theirs.saved:.2f} of its saved bytes" if theirs.saved else ""
        )
        lines.append(f"{one.case}, {one.system}: {one.speed:.2f}x the speed of torch.nn's{memory}")
    for system in ("fast", "lean"):
        if speeds := grid(suite, system):
            mean = math.exp(statistics.fmean(map(math.log, speeds.values())))
            average = f"{mean:.2f}x on average (geometric), at least {_least(speeds)}"
            lines.append(f"LSTM over the grid, {system}: {average}")
            left = left_to_torch(suite, system)
            own = {size: speed for size, speed in speeds.items() if size not in left}
            if left and own:
                left_text = f"{len(left)} of these are left to torch.nn's own layer"
                lines.append(f"{left_text}; the others are at least {_least(own)}")
    if suite.left_out:
        lines.append(f"too large for this machine's memory: {', '.join(map(str, suite.left_out))}")
    return lines


def _least(speeds: dict[tuple[int, int, int], float]) -> str:
    (steps, batch, hidden), least = min(speeds.items(), key=lambda item: item[1])
    return f"{least:.2f}x (T{steps} B{batch} H{hidden})"


def render(suite: LayerSuite) -> str:
    """Three tables for a terminal, and what they come to."""
    columns, speeds = grid_rows(suite)
    lines = [terminal_table(COLUMNS, rows(suite), words=2), ""]
    lines += ["LSTM, speed over the grid", terminal_table(columns, speeds, words=3), ""]
    lines += [terminal_table(ATTENTION_COLUMNS, attention_cells(suite), words=2), ""]
    return "\n".join([*lines, *summary(suite)])


def page(suite: LayerSuite) -> str:
    """`docs/benchmarks-rnn.md`."""
    columns, speeds = grid_rows(suite)
    sections = [*READING.splitlines(), ""]
    sections += [*markdown_table(COLUMNS, rows(suite)), "", *(f"- {line}" for line in summary(suite)), ""]
    sections += ["## LSTM, speed over the grid", "", "![Speed over the grid](benchmarks-rnn.png)", ""]
    sections += [*markdown_table(columns, speeds), "", "## Additive attention's scores", ""]
    sections += [*markdown_table(ATTENTION_COLUMNS, attention_cells(suite)), ""]
    return suite_page("Recurrent layers", "rnn", suite.quick, sections, suite.machine, suite.seconds)
