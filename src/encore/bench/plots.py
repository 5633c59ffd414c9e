"""Benchmarks drawn: what each system saves and what that costs, and budgets against what was measured."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from encore.bench.budgets import BudgetOutcome
from encore.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from encore.bench.contest import Outcome

OURS, PEERS = "#17996b", "#4f6f9f"
MIB = 1 << 20
MARKS = "osD^v<>ph*X"


def tradeoffs(outcomes: Mapping[str, Sequence[Outcome]]) -> Figure:
    """One panel a workload, one point a system: up is less memory, right is slower."""
    figure, panels = _panels(len(outcomes))
    systems = dict.fromkeys(one.system for found in outcomes.values() for one in found if not one.failure)
    marks = dict(zip(systems, itertools.cycle(MARKS), strict=False))
    points: dict[str, Any] = {}
    for axes, (workload, found) in zip(panels, outcomes.items(), strict=True):
        for one in found:
            if not one.failure:
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


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "plots are drawn with matplotlib, which is not installed; pip install 'encore-torch[plots]'"
        ) from error
    columns = min(2, count)
    figure = Figure(figsize=(6.5 * columns, 4.2 * -(-count // columns)), layout="constrained")
    axes: Any = figure.subplots(-(-count // columns), columns, squeeze=False)
    panels = [axes[number // columns][number % columns] for number in range(-(-count // columns) * columns)]
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels[:count]
