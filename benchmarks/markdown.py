"""Tables and pages in Markdown, which all suites share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from encore.machine import Machine, machine_rows
from encore.units import seconds_text


def suite_page(title: str, suite: str, quick: bool, sections: Iterable[str], machine: Machine, seconds: float) -> str:
    """A suite's page in docs: title, the command that wrote it, the sections, and how figures came about."""
    command = f"python -m benchmarks {suite}{' --quick' if quick else ''} --docs"
    lines = [f"# {title}", "", f"Written by `{command}`.", "", *sections]
    return "\n".join([*lines, *machine_section(machine, seconds)])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_row(columns), markdown_row(["---"] * len(columns)), *map(markdown_row, rows)]


def markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def machine_section(machine: Machine, seconds: float) -> list[str]:
    """How a page ends: commit, machine and day of its figures, and how long they took."""
    rows = [*machine_rows(machine), ("the suite took", seconds_text(seconds))]
    return ["## Commit and machine", "", *(f"- {name}: {value}" for name, value in rows), ""]
