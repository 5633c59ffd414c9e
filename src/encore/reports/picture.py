"""Memory over the step as a picture, before and after, drawn by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from encore.errors import MissingPackageError
from encore.reports.profile import LAYERS, Profile
from encore.units import bytes_text

if TYPE_CHECKING:
    from encore.reports.report import Report

COLOURS = ("#7d8ba1", "#b4bfcd", "#4f9fd6", "#e8a317", "#17996b", "#b05fa5", "#7768c9", "#d1603d", "#8a6d3b")
"""Of the layers, as on the page."""
BUDGET_COLOUR = "#c0262d"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
FAR = 1.6
"""A budget so many times above the peak is written in the title: its line would flatten the picture."""


def timeline_png(report: Report) -> bytes:
    """The picture as PNG; raises `MissingPackageError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "to_png draws with matplotlib, which is not installed; pip install 'encore-torch[plots]', "
            "or use to_html, which needs nothing"
        ) from error
    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    profiles = {"before: everything kept": report.unplanned.profile, "after: the plan": report.planned.profile}
    highest = max(max(profile.totals) for profile in profiles.values())
    near = report.budget is not None and report.budget <= FAR * highest
    top = max(highest, report.budget if near and report.budget else 0)
    unit = max((power for power in range(len(UNITS)) if 1024**power <= top), default=0)
    used = [layer for layer in LAYERS if any(any(profile.bytes[layer]) for profile in profiles.values())]
    for axes, (title, profile) in zip(panels, profiles.items(), strict=True):
        _draw(axes, title, profile, used, 1024**unit)
        if near and report.budget:
            axes.axhline(report.budget / 1024**unit, color=BUDGET_COLOUR, linestyle="--", linewidth=1.2)
            axes.annotate(
                f"budget {bytes_text(report.budget)}", (0.01, report.budget / 1024**unit), (0, 3),
                xycoords=("axes fraction", "data"), textcoords="offset points", ha="left", color=BUDGET_COLOUR,
            )  # fmt: skip
    panels[0].set_ylim(0, 1.15 * top / 1024**unit)
    panels[0].set_ylabel(f"memory held ({UNITS[unit]})")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    far = "" if near or report.budget is None else f", budget {bytes_text(report.budget)} (above the picture)"
    figure.suptitle(f"{report.name}: predicted memory of a training step{far}")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _draw(axes: Any, title: str, profile: Profile, layers: list[str], unit: int) -> None:
    edges = [*profile.at, profile.moments]
    base = [0.0] * len(profile.at)
    for layer in layers:
        top = [below + size / unit for below, size in zip(base, profile.bytes[layer], strict=True)]
        colour = COLOURS[list(LAYERS).index(layer)]
        axes.stairs(top, edges, baseline=base, fill=True, color=colour, label=layer, linewidth=0)
        base = top
    peak = profile.totals[profile.peak]
    middle = (edges[profile.peak] + edges[profile.peak + 1]) / 2
    axes.plot([middle], [peak / unit], "o", color="white", markeredgecolor="black", markersize=6)
    axes.annotate(f"peak {bytes_text(peak)}", (middle, peak / unit), (7, 6), textcoords="offset points", weight="bold")
    axes.axvline(profile.backward, color="grey", linestyle=":", linewidth=1)
    axes.set_xlim(0, profile.moments)
    axes.set_xlabel("moment of the step (forward | backward, not to scale in time)")
    axes.set_title(title, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
