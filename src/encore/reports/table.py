"""A report as text: totals, graphs, and the decision table in which repeated layers and time steps fold."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encore.codecs import CODECS, Share
from encore.units import bytes_text

if TYPE_CHECKING:
    from encore.reports.report import DecisionRow, GraphRow, LossyRow, Report

WIDTH = 118
LISTED_ROWS = 40
LISTED_LINES = 10
NUMBER = re.compile(r"\d+")


def render(report: Report) -> str:
    """The whole report, ready to print."""
    parts = [_totals(report), _graphs(report), _decisions(report)]
    return "\n".join(part for part in parts if part)


def _totals(report: Report) -> str:
    planned, unplanned = report.planned, bytes_text(report.unplanned.step_peak)
    beside = f"; {bytes_text(report.beside)} beside the step (optimizer)" if report.beside else ""
    lines = [
        f"Encore: {report.name} ({report.lowering} lowering)",
        f"  resident          {bytes_text(report.resident):>11}   parameters, buffers, inputs{beside}",
        f"  step peak         {bytes_text(planned.step_peak):>11}   predicted; unplanned {unplanned}",
        f"  saved for backward{bytes_text(planned.saved):>11}",
        f"  overhead          {planned.overhead:>10.1%}    predicted extra time",
        *_devices(report),
        *_measured(report),
    ]
    at_peak = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in planned.at_peak.items() if size)
    lines.append(f"  at the peak       {at_peak}")
    calls = sum(graph.kernel_calls for graph in report.graphs)
    if calls:
        rewrites = dict.fromkeys(name for graph in report.graphs for name in graph.rewrites)
        passes = f"; passes: {', '.join(rewrites)}" if rewrites else ""
        lines.append(
            f"  kernels           {sum(graph.kernels for graph in report.graphs)}, called {calls} times{passes}"
        )
    if planned.moved:
        measured = "" if report.stalled is None else f"; {report.stalled:.3f} s at the latest step"
        lines.append(
            f"  moved to tiers    {bytes_text(planned.moved):>11}   the step waits {planned.stall:.3f} s for it, "
            f"predicted{measured}"
        )
    lines += _codes(report)
    if any(report.first_step.values()):
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in report.first_step.items())
        lines.append(f"  first step        {stages}")
    return "\n".join(lines)


def _devices(report: Report) -> Iterator[str]:
    """What is taken of each device, if there are several or one of them reserves memory within a budget."""
    rows = [row for row in report.devices if row.allocated]
    for row in rows if len(rows) > 1 or any(row.reserved is not None for row in rows) else ():
        reserved = ""
        if row.reserved is not None and row.limit is not None:
            reserved = f"; reserves {bytes_text(row.reserved)} of {bytes_text(row.limit)}"
        yield (
            f"  on {row.device:<15}{bytes_text(row.allocated):>11}   allocated: resident {bytes_text(row.resident)}, "
            f"step peak {bytes_text(row.step_peak)}{reserved}"
        )


def _measured(report: Report) -> Iterator[str]:
    """A step that ran: its peak next to the budget, and the lines outside of the captured graphs behind it."""
    step = report.measured
    if step is None:
        return
    missed = f"; {bytes_text(step.excess)} ABOVE the budget of {bytes_text(step.limit or 0)}" if step.excess else ""
    yield f"  measured peak     {bytes_text(step.step_peak):>11}   step {step.number}, outside code included{missed}"
    if step.plain is not None:
        yield f"  outside code      {bytes_text(step.plain):>11}   of it, not in captured graphs"
        yield from (f"    {line}" for line in step.lines[:LISTED_LINES] if line.bytes)


def _codes(report: Report) -> Iterator[str]:
    """Codes that depend on the data: what they take, and what they lose."""
    seen = [row for row in report.decisions if row.largest is not None]
    if seen:
        planned, largest = (sum(sizes) for sizes in ((row.held for row in seen), (row.largest or 0 for row in seen)))
        yield f"  codes by density  {bytes_text(planned):>11}   planned; {bytes_text(largest)} at most so far"
        for share in Share:
            rows = [row for row in seen if CODECS[row.code].share is share]
            if rows:
                densities = (_mean_density(rows, "planned_density"), _mean_density(rows, "density"))
                yield f"  {share.value:<18}{densities[0]:>10.1%}    planned; {densities[1]:.1%} at most so far"
        yield f"  step peak, dense  {bytes_text(report.densest_step_peak):>11}   at most, were all of these maps dense"
    for code in dict.fromkeys(row.code for row in report.decisions if not row.lossless):
        rows = [row for row in report.decisions if row.code == code]
        errors = [row.error for row in rows if row.error is not None]
        bounds = [row.error_bound for row in rows if row.error_bound is not None]
        off = ""
        if errors and bounds:
            off = f", off by at most {max(bounds):.2g} of the largest number, {max(errors):.2g} at the first step"
        yield f"  lossy             {code} in the place of {len(rows)} feature maps{off}"
    if report.lossy is not None:
        yield f"  gradient error    {gradient_error_text(report.lossy)}"


def gradient_error_text(lossy: LossyRow) -> str:
    """The measured gradient error of lossy codecs next to its bound."""
    bound = "no bound" if lossy.bound is None else f"bound {lossy.bound:.3g}"
    if lossy.error is None:
        return f"not measured ({lossy.why_not}); {bound}"
    if lossy.error == 0:
        return f"0, no lossy codec is used; {bound}"
    single = "" if lossy.largest is None else f"; {lossy.largest:.3g} for a single parameter at most"
    often = f" in {len(lossy.checks)} steps" if len(lossy.checks) > 1 else " on the first batch"
    missed = "" if lossy.holds is not False else ": MISSED"
    skipped = f"; the latest check could not be made: {lossy.why_not}" if lossy.why_not else ""
    return f"{lossy.error:.3g} measured{often}, {bound}{missed}{single}{skipped}"


def _mean_density(rows: Sequence[DecisionRow], name: str) -> float:
    """The density of several maps, each by its bytes."""
    return sum((getattr(row, name) or 0.0) * row.bytes for row in rows) / max(1, sum(row.bytes for row in rows))


def _graphs(report: Report) -> str:
    """Several graphs, notes on them, and parts that run as plain PyTorch; nothing if there is none of these."""
    lines = []
    distinct = counted_graphs(report.graphs)
    for graph, times in distinct if len(report.graphs) > 1 else ():
        why = f"; ends at {graph.break_line}: {graph.break_reason}" if graph.break_reason else ""
        calls, each = (f" (x{times})", " a call") if times > 1 else ("", "")
        sizes = f"peak {bytes_text(graph.step_peak)}, saves {bytes_text(graph.saved)}{each}"
        lines.append(f"  {graph.name}{calls}: {graph.operators} operators, {sizes}{why}")
    lines += [f"  note on {graph.name}: {note}" for graph, _ in distinct for note in graph.notes]
    lines += [f"  plain PyTorch: {part}" for part in report.plain]
    return "\n".join(lines)


def counted_graphs(graphs: Sequence[GraphRow]) -> list[tuple[GraphRow, int]]:
    """The distinct graphs of a step, each with the number of its calls."""
    counts = Counter((graph.name, graph.break_line) for graph in graphs)
    distinct = {(graph.name, graph.break_line): graph for graph in graphs}
    return [(graph, counts[key]) for key, graph in distinct.items()]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the decision table: its cell of a row, of how many such rows, and of their common module."""

    heading: str
    cell: Callable[[DecisionRow, int, str], str]
    right: bool = False
    shown: Callable[[Sequence[DecisionRow]], bool] = lambda rows: True
    """Return whether the column has anything to show for these rows."""


COLUMNS = (
    Column("bytes", lambda row, times, module: bytes_text(row.bytes * times), right=True),
    Column(
        "held",
        lambda row, times, module: bytes_text(row.held * times),
        right=True,
        shown=lambda rows: any(row.code for row in rows),
    ),
    Column("times", lambda row, times, module: f"x{times}", right=True),
    Column("action", lambda row, times, module: f"{row.action} {row.code}{'' if row.lossless else ', lossy'}".rstrip()),
    Column("module", lambda row, times, module: module or "(model)"),
    Column("shape", lambda row, times, module: "x".join(map(str, row.shape)) or "scalar"),
    Column("line", lambda row, times, module: row.source),
    Column("why", lambda row, times, module: row.why, shown=lambda rows: len({row.why for row in rows}) > 1),
)
"""Adding a column is adding a row here."""


def _decisions(report: Report) -> str:
    folded = fold(report.decisions)
    if not folded:
        return ""
    rows = [row for row, _, _ in folded]
    columns = [column for column in COLUMNS if column.shown(rows)]
    from rich.console import Console  # here: most runs print no report
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.right else "left", overflow="fold")
    for one in folded[:LISTED_ROWS]:
        table.add_row(*(column.cell(*one) for column in columns))
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None, highlight=False).print(table)
    text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
    hidden = len(folded) - LISTED_ROWS
    if hidden > 0:
        text += f"\n... and {hidden} smaller rows; to_json() has them all"
    reasons = {row.why for row in rows}
    return text if len(reasons) > 1 else f"{text}\nwhy: {reasons.pop()}"


def fold(decisions: Iterable[DecisionRow]) -> list[tuple[DecisionRow, int, str]]:
    """Group rows that differ only in a layer's number or a time step: (first row, how many, module), largest first."""
    return [(rows[0], len(rows), module) for rows, module in fold_members(decisions)]


def fold_members(decisions: Iterable[DecisionRow]) -> list[tuple[list[DecisionRow], str]]:
    """The same with all rows of each group."""
    groups: dict[tuple[object, ...], list[DecisionRow]] = {}
    for row in decisions:
        place = (NUMBER.sub("#", row.module), row.operator, row.shape, row.source)
        key = (*place, row.bytes, row.held, row.action, row.code, row.why)
        groups.setdefault(key, []).append(row)
    folded = [(rows, common_path([row.module for row in rows])) for rows in groups.values()]
    return sorted(folded, key=lambda item: -item[0][0].bytes * len(item[0]))


def common_path(paths: list[str]) -> str:
    """`layers.0.fc`, ..., `layers.5.fc` -> `layers.[0-5].fc`."""
    numbers = [[int(digits) for digits in NUMBER.findall(path)] for path in paths]
    pieces = NUMBER.split(paths[0])
    text = pieces[0]
    for position, piece in enumerate(pieces[1:]):
        seen = sorted({row[position] for row in numbers})
        text += str(seen[0]) if len(seen) == 1 else _ranges(seen)
        text += piece
    return text


def _ranges(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"[{numbers[0]}-{numbers[-1]}]"
    return f"[{','.join(map(str, numbers))}]"
