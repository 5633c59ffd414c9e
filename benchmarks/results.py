"""The table of all suites, and what a run of one leaves: text, JSON, a page for the documentation, and pictures."""

from __future__ import annotations

import dataclasses
import functools
import html
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from benchmarks import (
    accuracy,
    accuracy_table,
    bptt,
    bptt_table,
    contest,
    contest_table,
    devices,
    devices_table,
    fast,
    fast_table,
    layers,
    layers_table,
    lengths,
    lengths_table,
    plan,
    plan_table,
    plots,
    spine,
    spine_table,
    steps,
    steps_table,
)
from benchmarks.schema import Written
from encore.compare.plots import png, tradeoffs
from encore.errors import OptionError
from encore.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
class Suite:
    """A suite: how it runs, what that returns, and how it is shown."""

    run: Callable[..., Any]
    """Takes `quick`, and `minutes` if the suite can leave systems out."""
    found: type[Written]
    """What `run` returns; its JSON, and the schema of that, are made from it."""
    table: ModuleType
    """Has `render` for a terminal and `page` for the documentation."""
    draw: Callable[[Any], Figure] | None = None
    """The picture of what `run` returned."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More arguments of `run`."""
    takes_minutes: bool = False
    parts: tuple[str, ...] = ()
    """If it can run a part alone and continue a run: the names of its parts. `run` takes `only` and `parts`, then."""


def _draw_grids(found: layers.LayerSuite) -> Figure:
    return plots.speeds({stash: layers_table.grid(found, stash) for stash in ("fast", "lean")})


def _contest(name: str) -> Suite:
    return Suite(
        contest.run_contest,
        contest.ContestSuite,
        contest_table,
        lambda found: tradeoffs(found.outcomes),
        options={"suite": name},
        takes_minutes=True,
    )


SUITES: dict[str, Suite] = {
    "spine": Suite(spine.run_spine, spine.SpineSuite, spine_table),
    "steps": Suite(steps.run_steps, steps.StepSuite, steps_table),
    "lengths": Suite(lengths.run_lengths, lengths.LengthSuite, lengths_table, parts=lengths.PARTS),
    "fast": Suite(fast.run_fast, fast.FastSuite, fast_table),
    "plan": Suite(plan.run_plan, plan.PlanSuite, plan_table, lambda found: plots.budgets(found.budgets)),
    "echo": _contest("echo"),
    "gist": _contest("gist"),
    "rnn": Suite(layers.run_layers, layers.LayerSuite, layers_table, _draw_grids),
    "rnn-workloads": _contest("rnn-workloads"),
    "accuracy": Suite(
        accuracy.run_accuracy, accuracy.AccuracySuite, accuracy_table, lambda found: plots.learning(found.trainings)
    ),
    "devices": Suite(devices.run_devices, devices.DevicesSuite, devices_table),
    "bptt": Suite(bptt.run_bptt, bptt.BpttSuite, bptt_table, lambda found: plots.through_time(found.outcomes)),
}
"""Adding a suite is adding a row."""


@dataclass(frozen=True, slots=True)
class Results:
    """One run of a suite, ready to be shown."""

    suite: str
    text: str
    """For a terminal."""
    json: str
    markdown: str
    draw: Callable[[], Figure] | None = None
    """The picture, if the suite has one."""
    interrupted: bool = False
    """A part of the suite: to be looked at, but not to replace a whole one."""

    def write_docs(self) -> None:
        """The suite's page in `docs`, with its picture."""
        page = docs_page(self.suite)
        if self.draw is not None:
            write_whole(page.with_suffix(".png"), png(self.draw()))
        write_whole(page, self.markdown)

    def write_plots(self, folder: Path) -> None:
        """The picture as PNG, and as a page of its own with the table."""
        if self.draw is None:
            raise OptionError(f"the suite {self.suite!r} has no picture; leave --plots out")
        figure = self.draw()
        title = html.escape(f"python -m benchmarks {self.suite}")
        page = PAGE.format(title=title, picture=plots.svg(figure), text=html.escape(self.text))
        write_whole(folder / f"{self.suite}.png", png(figure))
        write_whole(folder / f"{self.suite}.html", page)


def docs_page(name: str) -> Path:
    return Path("docs") / f"benchmarks-{name}.md"


def run(
    name: str,
    *,
    quick: bool,
    minutes: float | None = None,
    only: tuple[str, ...] = (),
    parts: Path | None = None,
) -> Results:
    """Run one suite: one that takes minutes in about so many, and of one that has parts those that are asked for, which
    are kept in a folder."""
    suite = SUITES[name]
    limit: dict[str, Any] = {"minutes": minutes} if suite.takes_minutes else {}
    if suite.parts:
        limit |= {"only": only, "parts": parts}
    started = time.perf_counter()
    found = suite.run(quick=quick, **suite.options, **limit)
    found = dataclasses.replace(found, seconds=time.perf_counter() - started)
    draw = None if suite.draw is None else functools.partial(suite.draw, found)
    text, page = suite.table.render(found), suite.table.page(found)
    return Results(name, text, found.to_json(), page, draw, getattr(found, "interrupted", False))
