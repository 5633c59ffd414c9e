"""What the wheel contains stands alone: no module of the package imports benchmarks, examples or tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import encore

PACKAGE = Path(encore.__file__).parent
OUTSIDE = {"benchmarks", "examples", "tests"}


def imported(source: str) -> set[str]:
    """Top-level packages that a module imports, inside functions as well."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_imports_are_found() -> None:
    assert imported("import a.b\ndef f():\n    from c.d import e\n") == {"a", "c"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_package_imports_nothing_outside_of_the_wheel(path: Path) -> None:
    assert not imported(path.read_text()) & OUTSIDE
