"""A report as one HTML file: styles, script and data are inside, and nothing is fetched.

The template lays out and escapes; the script (`templates/page.js`) draws charts and the table from the numbers here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from encore.reports.allocations import Allocation, alive_at_peak
from encore.reports.points import Point
from encore.reports.profile import LAYERS, Profile
from encore.reports.table import NUMBER, common_path, counted_graphs, fold_members, gradient_error_text
from encore.schedule import Kind
from encore.units import bytes_text

if TYPE_CHECKING:
    from encore.reports.report import DecisionRow, Report

LISTED_AT_PEAK = 10
RESIDENT = {Kind.PARAMETER.value: "parameters and buffers", Kind.INPUT.value: "inputs and constants"}
"""What is alive before the step, in one row each."""
MOST_ROWS = 4000
"""Rows of the decision table; what a page leaves out is in the JSON."""
MOST_MEMBERS = 300
"""Activations that a folded row can be unfolded to."""


def html_page(report: Report, *, measured: Sequence[Point] = (), peers: Sequence[Point] = ()) -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("encore.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": False}
    environment.filters["bytes"] = bytes_text

    def verbatim(name: str) -> Markup:
        assert environment.loader is not None
        return Markup(environment.loader.get_source(environment, name)[0])

    return environment.get_template("page.html").render(
        report=report,
        total=report.resident + report.planned.step_peak,
        before=report.resident + report.unplanned.step_peak,
        at_peak=at_peak(report.allocations),
        graphs=counted_graphs(report.graphs),
        gradient_error="" if report.lossy is None else gradient_error_text(report.lossy),
        data=page_data(report, measured, peers),
        style=verbatim("page.css"),
        script=verbatim("page.js"),
    )


def page_data(report: Report, measured: Sequence[Point], peers: Sequence[Point]) -> dict[str, Any]:
    """The numbers behind the charts and the table."""
    return {
        "layers": list(LAYERS),
        "profiles": {"unplanned": _profile(report.unplanned.profile), "planned": _profile(report.planned.profile)},
        "budget": report.budget,
        "resident": report.resident,
        "pareto": report.pareto,
        "taken": (report.resident + report.planned.step_peak, report.planned.overhead),
        "before": report.resident + report.unplanned.step_peak,
        "measured": [dataclasses.asdict(point) for point in measured],
        "peers": [dataclasses.asdict(point) for point in peers],
        "decisions": decision_data(report.decisions),
    }


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "moments": profile.moments,
        "at": profile.at,
        "backward": profile.backward,
        "what": profile.what,
        "bytes": list(profile.bytes.values()),
        "peak": profile.peak,
    }


def decision_data(decisions: Sequence[DecisionRow]) -> dict[str, Any]:
    """Folded rows, largest first; a reason or module is written once and then numbered."""
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(text, len(numbers))

    folded = fold_members(decisions)
    rows = [
        {
            "action": first.action,
            "code": first.code,
            "held": first.held,
            "module": number(module or "(model)"),
            "operator": number(first.operator),
            "source": number(first.source),
            "shape": number("x".join(map(str, first.shape)) or "scalar"),
            "why": number(first.why),
            "bytes": first.bytes,
            "seconds": _short(sum(row.seconds for row in rows)),
            "count": len(rows),
            "members": [
                (row.value, number(row.module or "(model)"), _short(row.seconds))
                for row in sorted(rows, key=_layer)[:MOST_MEMBERS]
            ],
        }
        for rows, module in folded[:MOST_ROWS]
        for first in rows[:1]
    ]
    return {"rows": rows, "texts": list(numbers), "left_out": max(0, len(folded) - MOST_ROWS)}


def _layer(row: DecisionRow) -> list[int]:
    """The numbers in a module's path: `layers.10.fc` comes after `layers.9.fc`."""
    return [int(digits) for digits in NUMBER.findall(row.module)]


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


@dataclasses.dataclass(frozen=True, slots=True)
class Alive:
    """Tensors of one role that are alive at the peak."""

    what: str
    kind: str
    module: str
    source: str
    shape: str
    bytes: int
    count: int
    share: float
    """Of all that is alive there."""


def at_peak(allocations: Sequence[Allocation]) -> list[Alive]:
    """The largest tensors alive at the peak, those of repeated layers and steps together."""
    groups: dict[tuple[object, ...], list[Allocation]] = {}
    alive = alive_at_peak(allocations)
    for item in alive:
        role = (NUMBER.sub("#", item.module), item.operator, item.source, item.shape)
        groups.setdefault((item.kind,) if item.kind in RESIDENT else (item.kind, *role), []).append(item)
    whole = sum(item.bytes for item in alive)
    found = []
    for items in groups.values():
        first, size = items[0], sum(item.bytes for item in items)
        found.append(
            Alive(
                what=RESIDENT.get(first.kind) or first.operator or first.name,
                kind=first.kind,
                module=common_path([item.module for item in items]),
                source=first.source,
                shape="" if first.kind in RESIDENT else "x".join(map(str, first.shape)),
                bytes=size,
                count=len(items),
                share=size / whole,
            )
        )
    return sorted(found, key=lambda alive: -alive.bytes)[:LISTED_AT_PEAK]
