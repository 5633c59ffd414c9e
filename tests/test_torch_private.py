"""PyTorch's private API is used in one place of each room, `torch_private`; docs/architecture.md lists these places."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "encore"
PLACE = "torch_private"
PUBLIC = ("torch.ops",)
"""Operators, whose names may begin with an underscore."""


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every import from, and every attribute of, a private module of PyTorch, and of every private
    name of a public one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if is_private(name))


def is_private(name: str) -> bool:
    first, *parts = name.split(".")
    if first != "torch" or name.startswith(PUBLIC):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def rooms() -> list[str]:
    return sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize("room", rooms())
def test_private_names_are_used_in_one_place(room: str) -> None:
    whole = PACKAGE / room
    outside = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for path in (whole.rglob("*.py") if whole.is_dir() else [whole])
        if PLACE not in path.relative_to(PACKAGE).with_suffix("").parts
        for line, name in private_names(ast.parse(path.read_text()))
    ]
    assert not outside


def test_the_documentation_lists_the_places() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"^\| `(\w+(?:/\w+)+\.py)` \|", text, re.MULTILINE))
    there = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if PLACE in path.relative_to(PACKAGE).with_suffix("").parts and path.name != "__init__.py"
    }
    assert listed == there


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch._ops import OpOverload", ["torch._ops.OpOverload"]),
        ("from torch import _C", ["torch._C"]),
        ("from torch.utils import _pytree as pytree", ["torch.utils._pytree"]),
        ("torch._C._functorch.peek()", ["torch._C._functorch.peek", "torch._C._functorch", "torch._C"]),
        ("torch.ops.aten._softmax.default; torch.__version__; x._base", []),
        ("from torch import nn", []),
    ],
)
def test_private_names_are_found(code: str, found: list[str]) -> None:
    assert [name for _, name in private_names(ast.parse(code))] == found
