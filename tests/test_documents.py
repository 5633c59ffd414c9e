"""The documents name files and functions that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "encore"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = (
    "codecs/uint24.py",
    "rewrite/drop_negations.py",
    "fates/narrow.py",
    "tiers/zipped.py",
    "nmt.py",
)
"""Files that worked examples add, or that belong to a user."""
FILE = re.compile(r"`([\w/]+\.(?:py|cpp|js|html))\b")
STEP = re.compile(r"^\| `([\w.]+)`(?:, `([\w.]+)`)? \| `([\w/]+\.py)` \|", re.MULTILINE)


def named_files(page: Path) -> set[str]:
    return {name for name in FILE.findall(page.read_text()) if not name.endswith(EXAMPLES)}


def steps() -> Iterator[tuple[str, str]]:
    """Function and file of every row of "One batch, followed through the code"."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## One batch, followed through the code\n")[2].partition("\n## ")[0]
    for first, second, path in STEP.findall(section):
        yield first, path
        if second:
            yield second, path


def defined_in(path: Path) -> set[str]:
    """The classes, functions and methods of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def endings() -> set[str]:
    """Every file of the repository, under each of its shorter names: `a/b/c.py`, `b/c.py`, `c.py`."""
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "examples"))
    parts = [path.relative_to(ROOT).parts for folder in folders for path in folder.rglob("*.*")]
    return {"/".join(path[start:]) for path in parts for start in range(len(path))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    assert not named_files(page) - endings()


@pytest.mark.parametrize(("function", "path"), list(steps()))
def test_the_functions_of_a_step_exist(function: str, path: str) -> None:
    assert function in defined_in(PACKAGE / path)


def test_the_steps_are_found() -> None:
    assert len(list(steps())) > 20
