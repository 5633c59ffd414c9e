"""How far long work is: a bar where a terminal looks on, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[str], None]
PLAIN_LINES = 10


@contextlib.contextmanager
def progress(label: str, total: int, *, lines: bool = True, done: int = 0) -> Iterator[Advance]:
    """Gives a function to call after each of `total` pieces of work, with a note on how it went; `done` of them were
    done before. Without a terminal and with `lines=False` it says nothing.

    The bar is drawn from these calls alone: a thread that redraws it would disturb the step being timed.
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
    """As `progress`, for work whose amount is not known: what is being done now, after how long."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as line:
            task = line.add_task(label, total=None, note="")
            line.refresh()
            yield lambda note: line.update(task, note=note, refresh=True)
    else:
        yield lambda note: print(f"{label}: {note}", file=sys.stderr, flush=True)


def _bar() -> Progress:
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
