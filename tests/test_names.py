"""Names in the package: class names are unique, no function is named like its module, and functions are short."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "encore"
MOST_LINES = 60


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """The path and syntax tree of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_a_class_name_is_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_no_function_is_named_like_its_module() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in modules()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == path.stem
    ]
    assert not found


def test_functions_are_short() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MOST_LINES
    ]
    assert not found


def test_docstrings_ask_no_questions() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {question.group().strip()}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for question in re.finditer(r"[^.:]*\w\?(?=\s|$)", node.value.value)
    ]
    assert not found
