"""What is left of a run of the benchmark: text, JSON, a page for the documentation, and pictures of it."""

from __future__ import annotations

import dataclasses
import html
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks import plots
from benchmarks.schema import Layout
from encore.errors import OptionError
from encore.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = TypeVar("Found")
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 110ch; padding: 0 1rem; }}
svg {{ max-width: 100%; height: auto; background: white; }}
pre {{ overflow-x: auto; font-size: 12px; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16191d; color: #e6e6e6; }} }}
</style>
<h1>{title}</h1>
{picture}
<pre>{text}</pre>
</html>
"""


@dataclass(frozen=True, slots=True)
class Results:
    """One run, ready to be shown."""

    suite: str
    text: str
    """For a terminal."""
    json: str
    markdown: str
    draw: Callable[[], Figure] | None = None
    """The picture, where there is one to draw."""
    interrupted: bool = False
    """A part of the suite: to be looked at, but not to take the place of a whole one."""

    def write_docs(self) -> None:
        """The suite's page in `docs`, with its picture beside it."""
        page = docs_page(self.suite)
        if self.draw is not None:
            write_whole(page.with_suffix(".png"), plots.png(self.draw()))
        write_whole(page, self.markdown)

    def write_plots(self, folder: Path) -> None:
        """The picture as PNG, and as a page of its own with the table."""
        if self.draw is None:
            raise OptionError(f"the suite {self.suite!r} has no picture; leave --plots out")
        figure = self.draw()
        title = html.escape(f"python -m benchmarks {self.suite}")
        page = PAGE.format(title=title, picture=plots.svg(figure), text=html.escape(self.text))
        write_whole(folder / f"{self.suite}.png", plots.png(figure))
        write_whole(folder / f"{self.suite}.html", page)


def docs_page(suite: str) -> Path:
    return Path("docs") / f"benchmarks-{suite}.md"


def _timed(run: Callable[[], Found]) -> Found:
    """A run of a suite, with the seconds that it took."""
    started = time.perf_counter()
    found: Any = run()
    return dataclasses.replace(found, seconds=time.perf_counter() - started)


def _spine(*, quick: bool) -> Results:
    from benchmarks.suite import run_suite
    from benchmarks.table import page, render

    suite = _timed(lambda: run_suite(quick=quick))
    return Results("spine", render(suite), suite.to_json(), page(suite))


def _fast(*, quick: bool) -> Results:
    from benchmarks.fast import run_fast
    from benchmarks.fast_table import page, render

    suite = _timed(lambda: run_fast(quick=quick))
    return Results("fast", render(suite), suite.to_json(), page(suite))


def _plan(*, quick: bool) -> Results:
    from benchmarks.plan import run_plan
    from benchmarks.plan_table import page, render

    suite = _timed(lambda: run_plan(quick=quick))
    return Results("plan", render(suite), suite.to_json(), page(suite), lambda: plots.budgets(suite.budgets))


def _accuracy(*, quick: bool) -> Results:
    from benchmarks.accuracy import run_accuracy
    from benchmarks.accuracy_table import page, render

    suite = _timed(lambda: run_accuracy(quick=quick))
    return Results("accuracy", render(suite), suite.to_json(), page(suite), lambda: plots.learning(suite.trainings))


def _layers(*, quick: bool) -> Results:
    from benchmarks.layers import run_layers
    from benchmarks.layers_table import grid, page, render

    suite = _timed(lambda: run_layers(quick=quick))
    grids = {stash: grid(suite, stash) for stash in ("fast", "lean")}
    return Results("rnn", render(suite), suite.to_json(), page(suite), lambda: plots.speeds(grids))


def _bptt(*, quick: bool) -> Results:
    from benchmarks.bptt import run_bptt
    from benchmarks.bptt_table import page, render

    suite = _timed(lambda: run_bptt(quick=quick))
    return Results("bptt", render(suite), suite.to_json(), page(suite), lambda: plots.through_time(suite.outcomes))


def _contest(name: str, *, quick: bool, minutes: float | None) -> Results:
    from benchmarks.contest import run_contest
    from benchmarks.contest_table import page, render

    suite = _timed(lambda: run_contest(name, quick=quick, minutes=minutes))
    return Results(
        name, render(suite), suite.to_json(), page(suite), lambda: plots.tradeoffs(suite.outcomes), suite.interrupted
    )


SUITES = ("spine", "fast", "plan", "echo", "gist", "rnn", "rnn-workloads", "accuracy", "bptt")
LIMITED = ("echo", "gist", "rnn-workloads")
"""Suites that can be given a number of minutes."""
DRAWN = ("plan", "echo", "gist", "rnn", "rnn-workloads", "accuracy", "bptt")


def run(suite: str, *, quick: bool, minutes: float | None = None) -> Results:
    """Run one suite; those of `LIMITED` in about so many minutes."""
    own = {
        "spine": _spine, "fast": _fast, "plan": _plan, "rnn": _layers, "accuracy": _accuracy, "bptt": _bptt,
    }  # fmt: skip
    return own[suite](quick=quick) if suite in own else _contest(suite, quick=quick, minutes=minutes)


def schema(suite: str) -> dict[str, Any]:
    """What a file of the suite's JSON looks like, as JSON Schema."""
    from benchmarks import accuracy, bptt, contest, fast, layers, plan
    from benchmarks import suite as spine

    own: dict[str, tuple[Layout, type]] = {
        "spine": (spine.LAYOUT, spine.Suite),
        "fast": (fast.LAYOUT, fast.FastSuite),
        "plan": (plan.LAYOUT, plan.PlanSuite),
        "rnn": (layers.LAYOUT, layers.LayerSuite),
        "accuracy": (accuracy.LAYOUT, accuracy.AccuracySuite),
        "bptt": (bptt.LAYOUT, bptt.BpttSuite),
    }
    layout, kind = own.get(suite, (contest.LAYOUT, contest.ContestSuite))
    return layout.schema(kind)
