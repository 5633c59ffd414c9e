"""Names in the package: class names are unique, no function is named like its module, and functions are short."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "encore"
MOST_LINES = 60

STILL_SHARED = frozenset({
    "Call", "Choice", "Free", "Keep", "Layout", "Load", "Offload", "Operands", "Run", "Schedule", "Seconds", "Stash",
    "Store", "_Block", "_Match",
})  # fmt: skip
"""Names of several classes, in rooms that are being rewritten."""
STILL_NAMED_LIKE_ITS_MODULE = frozenset({"bptt", "kernels", "plan", "report", "rewrite", "rnn", "schedule"})
STILL_LONG = frozenset({"bptt", "rnn"})


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    """The room, path and syntax tree of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).parts[0], path, ast.parse(path.read_text())


def test_a_class_name_is_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for _, path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in STILL_SHARED}


def test_no_function_is_named_like_its_module() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for room, path, tree in modules()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == path.stem and room not in STILL_NAMED_LIKE_ITS_MODULE
    ]
    assert not found


def test_functions_are_short() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for room, path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and room not in STILL_LONG
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MOST_LINES
    ]
    assert not found
