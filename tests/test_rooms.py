"""Rooms of the package import one way: what docs/architecture.md draws is what the code does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "encore"


def levels() -> dict[str, int]:
    """The line of each room or module in the list of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.search(r"## The order of the rooms\n.*?```\n(.*?)```", text, re.DOTALL)
    assert drawn
    lines = drawn.group(1).splitlines()
    return {room: level for level, line in enumerate(lines) for room in line.split()}


def room_of(path: Path) -> str:
    """The first folder below the package, or the module itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and room of everything of the package that a module imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                first, *rest = name.name.split(".")
                if first == "encore":
                    yield node.lineno, rest[0] if rest else "__init__"
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            first, *rest = (node.module or "").split(".")
            if first == "encore":
                names = [name.name for name in node.names]
                yield from ((node.lineno, room) for room in (rest[:1] or map(room_named, names)))


def room_named(name: str) -> str:
    """`from encore import name`: a room, or what the package itself offers."""
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists() else "__init__"


def rooms_there() -> set[str]:
    return {room_of(path) for path in PACKAGE.rglob("*.py")}


def test_every_room_is_drawn() -> None:
    assert set(levels()) == rooms_there()


@pytest.mark.parametrize("room", sorted(rooms_there()))
def test_imports_go_one_way(room: str) -> None:
    order = levels()
    paths = [path for path in PACKAGE.rglob("*.py") if room_of(path) == room]
    against = [
        f"{path.relative_to(ROOT)}:{line} imports {other}"
        for path in paths
        for line, other in imported(ast.parse(path.read_text()))
        if other != room and order[other] >= order[room]
    ]
    assert not against
