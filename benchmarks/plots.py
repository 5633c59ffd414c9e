"""Benchmarks drawn: budgets and measured peaks, learning curves, speeds, time and memory by length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from encore.compare.plots import MARKS, OURS, PEERS, panels, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.accuracy import Training
    from benchmarks.bptt import Outcome
    from benchmarks.budgets import BudgetOutcome

MIB = 1 << 20


def budgets(outcomes: Mapping[str, Sequence[BudgetOutcome]]) -> Figure:
    """One panel a workload: no point may lie above the diagonal."""
    figure, drawn = panels(len(outcomes))
    for axes, (workload, found) in zip(drawn, outcomes.items(), strict=True):
        limits = [one.budget / MIB for one in found]
        axes.plot(limits, limits, color="grey", linewidth=0.8, linestyle="--", label="the budget")
        axes.plot(limits, [one.measured / MIB for one in found], "o-", color=OURS, label="measured")
        axes.plot(limits, [one.predicted / MIB for one in found], "x", color="black", label="predicted")
        axes.set(title=workload, xlabel="budget for the step (MiB)", ylabel="peak of the step (MiB)")
        axes.legend(frameon=False, fontsize=8)
    return figure


def learning(trainings: Mapping[str, Sequence[Training]]) -> Figure:
    """One panel a workload: the loss of every variant, smoothed, over the steps."""
    figure, drawn = panels(len(trainings))
    for axes, (workload, found) in zip(drawn, trainings.items(), strict=True):
        for one in (one for one in found if one.seed == 0):
            at_once = one.variant.endswith("at once")
            axes.plot(_smoothed(one.losses), linewidth=1.2, linestyle=":" if at_once else "-", label=one.variant)
        axes.set(title=workload, xlabel="step", ylabel="training loss", yscale="log")
        axes.legend(frameon=False, fontsize=8)
    return figure


def _smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last few steps at every step."""
    few = max(1, len(losses) // 30)
    return [sum(part) / len(part) for end in range(1, len(losses) + 1) if (part := losses[max(0, end - few) : end])]


def speeds(grids: Mapping[str, Mapping[tuple[int, int, int], float]]) -> Figure:
    """One panel a stash and length, one square a batch and width: green is faster than `torch.nn`, red is slower."""
    lengths = sorted({steps for grid in grids.values() for steps, _, _ in grid})
    figure, drawn = panels(len(grids) * len(lengths), columns=len(lengths), size=(4.2, 3.6))
    for axes, (stash, steps) in zip(drawn, itertools.product(grids, lengths), strict=True):
        grid = {(batch, hidden): speed for (at, batch, hidden), speed in grids[stash].items() if at == steps}
        batches, widths = (sorted({key[part] for key in grid}) for part in (0, 1))
        table = [[math.log2(grid.get((batch, hidden), math.nan)) for hidden in widths] for batch in batches]
        axes.imshow(table, cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto")
        for (row, batch), (column, hidden) in itertools.product(enumerate(batches), enumerate(widths)):
            speed = grid.get((batch, hidden))
            axes.text(column, row, f"{speed:.2f}" if speed else "-", ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(widths)), [str(hidden) for hidden in widths])
        axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set(title=f"{stash}, {steps} steps", xlabel="units", ylabel="batch")
    return figure


def through_time(outcomes: Sequence[Outcome]) -> Figure:
    """Time a step and peak against the length of the sequence, a line a system."""
    figure, (seconds, peaks) = panels(2)
    for mark, system in zip(MARKS, dict.fromkeys(one.system for one in outcomes), strict=False):
        found = [one for one in outcomes if one.system == system]
        colour = OURS if system.startswith("encore") else PEERS
        style: dict[str, Any] = {"marker": mark, "color": colour, "label": system}
        seconds.plot([one.steps for one in found], [one.seconds * 1e6 for one in found], **style)
        measured = [(one.steps, one.peak / MIB) for one in found if one.peak is not None]
        peaks.plot(*zip(*measured, strict=True), **style)
    seconds.set(xscale="log", xlabel="steps", ylabel="microseconds a step", ylim=(0, None))
    peaks.set(xscale="log", yscale="log", xlabel="steps", ylabel="peak (MiB)")
    seconds.legend(frameon=False, fontsize=8)
    return figure


def svg(figure: Figure) -> str:
    """To put into a page: without the XML heading."""
    text = saved(figure, "svg").decode()
    return text[text.index("<svg") :]
