"""What is left of a run of the benchmark: text, JSON, a page for the documentation, and pictures of it."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from encore.bench import plots
from encore.errors import OptionError

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
class Results:
    """One run, ready to be shown."""

    suite: str
    text: str
    """For a terminal."""
    json: str
    markdown: str
    draw: Callable[[], Figure] | None = None
    """The picture, where there is one to draw."""

    def write_docs(self) -> None:
        """The suite's page in `docs`, with its picture beside it."""
        page = docs_page(self.suite)
        page.write_text(self.markdown)
        if self.draw is not None:
            page.with_suffix(".png").write_bytes(plots.png(self.draw()))

    def write_plots(self, folder: Path) -> None:
        """The picture as PNG, and as a page of its own with the table."""
        if self.draw is None:
            raise OptionError(f"the suite {self.suite!r} has no picture; leave --plots out")
        figure = self.draw()
        title = html.escape(f"encore bench {self.suite}")
        (folder / f"{self.suite}.png").write_bytes(plots.png(figure))
        page = PAGE.format(title=title, picture=plots.svg(figure), text=html.escape(self.text))
        (folder / f"{self.suite}.html").write_text(page)


def docs_page(suite: str) -> Path:
    return Path("docs") / ("benchmarks.md" if suite == "spine" else f"benchmarks-{suite}.md")


def _spine(*, quick: bool) -> Results:
    from encore.bench.suite import run_suite
    from encore.bench.table import page, render

    suite = run_suite(quick=quick)
    return Results("spine", render(suite), suite.to_json(), page(suite))


def _fast(*, quick: bool) -> Results:
    from encore.bench.fast import run_fast
    from encore.bench.fast_table import page, render

    suite = run_fast(quick=quick)
    return Results("fast", render(suite), suite.to_json(), page(suite))


def _plan(*, quick: bool) -> Results:
    from encore.bench.plan import run_plan
    from encore.bench.plan_table import page, render

    suite = run_plan(quick=quick)
    return Results("plan", render(suite), suite.to_json(), page(suite), lambda: plots.budgets(suite.budgets))


def _contest(name: str, *, quick: bool) -> Results:
    from encore.bench.contest import run_contest
    from encore.bench.contest_table import page, render

    suite = run_contest(name, quick=quick)
    return Results(name, render(suite), suite.to_json(), page(suite), lambda: plots.tradeoffs(suite.outcomes))


SUITES = ("spine", "fast", "plan", "echo", "gist", "rnn")
DRAWN = ("plan", "echo", "gist", "rnn")


def run(suite: str, *, quick: bool) -> Results:
    """Run one suite."""
    own = {"spine": _spine, "fast": _fast, "plan": _plan}
    return own[suite](quick=quick) if suite in own else _contest(suite, quick=quick)
