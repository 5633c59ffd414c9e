"""Outcomes as a picture: peak against step time, a point a system."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from encore.compare.outcome import Outcome
from encore.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, PEERS = "#17996b", "#4f6f9f"
MARKS = "osD^v<>ph*X"


def tradeoffs(outcomes: Mapping[str, Sequence[Outcome]]) -> Figure:
    """One panel a model, one point a system: up is less memory, right is slower. Systems without ratios to eager have
    no point."""
    drawn = {name: [one for one in found if one.ran] for name, found in outcomes.items()}
    figure, axes = panels(len(drawn))
    systems = dict.fromkeys(one.system for found in drawn.values() for one in found)
    marks = dict(zip(systems, itertools.cycle(MARKS), strict=False))
    points: dict[str, Any] = {}
    for panel, (name, found) in zip(axes, drawn.items(), strict=True):
        for one in found:
            (points[one.system],) = panel.plot(
                one.against_eager,
                one.reduction,
                marker=marks[one.system],
                color=OURS if one.is_encore else PEERS,
                markersize=8,
                linestyle="none",
            )
        panel.axvline(1, color="grey", linewidth=0.8, linestyle=":")
        panel.set(title=name, xlabel="step time / eager", ylabel="peak: eager / system")
        panel.margins(0.1)
    figure.legend([points[system] for system in systems], list(systems), loc="outside right center", frameon=False)
    return figure


def require_matplotlib() -> None:
    """Raise `MissingPackageError` if nothing can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "plots are drawn with matplotlib, which is not installed; pip install 'encore-torch[plots]'"
        ) from error


def panels(count: int, columns: int = 2, size: tuple[float, float] = (6.5, 4.2)) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels."""
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    found = list(axes.flat)
    for unused in found[count:]:
        unused.set_visible(False)
    return figure, found[:count]


def png(figure: Figure) -> bytes:
    return saved(figure, "png")


def saved(figure: Figure, format_: str) -> bytes:
    """The figure as a file without dates and names of programs."""
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type")) if format_ == "svg" else None
    figure.savefig(buffer, format=format_, dpi=120, metadata=nothing)
    return buffer.getvalue()
