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
def progress(label: str, total: int, *, lines: bool = True) -> Iterator[Advance]:
    """Gives a function to call after each of `total` pieces of work, with a note on how it went. Without a terminal
    and with `lines=False` it says nothing.

    The bar is drawn from these calls alone: a thread that redraws it would disturb the step being timed.
    """
    if sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task(label, total=total, note="")
            bar.refresh()
            yield lambda note: bar.update(task, advance=1, note=note, refresh=True)
    else:
        yield _lines(label, total) if lines else lambda note: None


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)


def _lines(label: str, total: int) -> Advance:
    done = 0

    def advance(note: str) -> None:
        nonlocal done
        done += 1
        if done == 1 or done * PLAIN_LINES // total > (done - 1) * PLAIN_LINES // total:
            print(f"{label} {done}/{total}  {note}".rstrip(), file=sys.stderr, flush=True)

    return advance
