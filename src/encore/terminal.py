"""Tables and progress for a terminal. Progress goes to stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

# rich is imported where it is used first: it takes a tenth of a second, and most runs print no table.
if TYPE_CHECKING:
    from rich.progress import Progress

WIDEST = 220


def terminal_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> str:
    """A table whose first columns are words, and the others figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position >= words else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    buffer = io.StringIO()
    Console(file=buffer, width=WIDEST, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


Advance = Callable[[str], None]
PLAIN_LINES = 10


@contextlib.contextmanager
def progress(label: str, total: int, *, lines: bool = True, done: int = 0) -> Iterator[Advance]:
    """Yield a function to call with a note after each of `total` pieces of work; `done` of them were done before.
    Without a terminal and with `lines=False` nothing is printed.

    The bar is drawn in these calls alone: a thread that redraws it would disturb the step being timed.
    """
    if sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task(label, total=total, completed=done, note="")
            bar.refresh()
            yield lambda note: bar.update(task, advance=1, note=note, refresh=True)
    else:
        yield _lines(label, total, done) if lines else lambda note: None


@contextlib.contextmanager
def notes(label: str) -> Iterator[Advance]:
    """Like `progress`, for an unknown amount of work: show the last note and the time."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as line:
            task = line.add_task(label, total=None, note="")
            line.refresh()
            yield lambda note: line.update(task, note=note, refresh=True)
    else:
        yield lambda note: print(f"{label}: {note}", file=sys.stderr, flush=True)


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)


def _lines(label: str, total: int, done: int) -> Advance:
    first = done + 1

    def advance(note: str) -> None:
        nonlocal done
        done += 1
        if done == first or done * PLAIN_LINES // total > (done - 1) * PLAIN_LINES // total:
            print(f"{label} {done}/{total}  {note}".rstrip(), file=sys.stderr, flush=True)

    return advance
