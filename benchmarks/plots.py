"""Benchmarks drawn: what each system saves and what that costs, budgets against what was measured, learning curves."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.budgets import BudgetOutcome
from encore.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.accuracy import Training
    from benchmarks.bptt import Outcome as BpttOutcome
    from benchmarks.contest import Outcome

OURS, PEERS = "#17996b", "#4f6f9f"
MIB = 1 << 20
MARKS = "osD^v<>ph*X"


def tradeoffs(outcomes: Mapping[str, Sequence[Outcome]]) -> Figure:
    """One panel a workload, one point a system: up is less memory, right is slower."""
    figure, panels = _panels(len(outcomes))
    systems = dict.fromkeys(one.system for found in outcomes.values() for one in found if one.ran)
    marks = dict(zip(systems, itertools.cycle(MARKS), strict=False))
    points: dict[str, Any] = {}
    for axes, (workload, found) in zip(panels, outcomes.items(), strict=True):
        for one in found:
            if one.ran:
                (points[one.system],) = axes.plot(
                    one.against_eager,
                    one.reduction,
                    marker=marks[one.system],
                    color=OURS if one.is_encore else PEERS,
                    markersize=8,
                    linestyle="none",
                )
        axes.axvline(1, color="grey", linewidth=0.8, linestyle=":")
        axes.set(title=workload, xlabel="step time / eager", ylabel="peak: eager / system")
        axes.margins(0.1)
    figure.legend([points[system] for system in systems], list(systems), loc="outside right center", frameon=False)
    return figure


def budgets(outcomes: Mapping[str, Sequence[BudgetOutcome]]) -> Figure:
    """One panel a workload: no point may lie above the diagonal."""
    figure, panels = _panels(len(outcomes))
    for axes, (workload, found) in zip(panels, outcomes.items(), strict=True):
        limits = [one.budget / MIB for one in found]
        axes.plot(limits, limits, color="grey", linewidth=0.8, linestyle="--", label="the budget")
        axes.plot(limits, [one.measured / MIB for one in found], "o-", color=OURS, label="measured")
        axes.plot(limits, [one.predicted / MIB for one in found], "x", color="black", label="predicted")
        axes.set(title=workload, xlabel="budget for the step (MiB)", ylabel="peak of the step (MiB)")
        axes.legend(frameon=False, fontsize=8)
    return figure


def learning(trainings: Mapping[str, Sequence[Training]]) -> Figure:
    """One panel a workload: the loss of every variant, smoothed, over the steps."""
    figure, panels = _panels(len(trainings))
    for axes, (workload, found) in zip(panels, trainings.items(), strict=True):
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
    figure, panels = _panels(len(grids) * len(lengths), columns=len(lengths), size=(4.2, 3.6))
    for axes, (stash, steps) in zip(panels, itertools.product(grids, lengths), strict=True):
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


def through_time(outcomes: Sequence[BpttOutcome]) -> Figure:
    """Time a step and peak against the length of the sequence, a line a system."""
    figure, (seconds, peaks) = _panels(2)
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


def png(figure: Figure) -> bytes:
    return _saved(figure, "png")


def svg(figure: Figure) -> str:
    """To put into a page: without the XML heading."""
    text = _saved(figure, "svg").decode()
    return text[text.index("<svg") :]


def _saved(figure: Figure, format_: str) -> bytes:
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type")) if format_ == "svg" else None
    figure.savefig(buffer, format=format_, dpi=120, metadata=nothing)
    return buffer.getvalue()


def _panels(
    count: int, columns: int = 2, size: tuple[float, float] = (6.5, 4.2)
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "plots are drawn with matplotlib, which is not installed; pip install 'encore-torch[plots]'"
        ) from error
    columns = min(columns, count)
    figure = Figure(figsize=(size[0] * columns, size[1] * -(-count // columns)), layout="constrained")
    axes: Any = figure.subplots(-(-count // columns), columns, squeeze=False)
    panels = [axes[number // columns][number % columns] for number in range(-(-count // columns) * columns)]
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels[:count]
