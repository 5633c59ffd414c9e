"""Tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

WIDEST = 220


def terminal_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> str:
    """A table whose first columns are words, and the others figures."""
    table = Table(box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position >= words else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    buffer = io.StringIO()
    Console(file=buffer, width=WIDEST, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())
