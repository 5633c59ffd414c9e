"""The wheel is complete without the repository: no module of the package imports benchmarks, examples or tests, and the
README's example runs where only the wheel is installed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import encore

PACKAGE = Path(encore.__file__).parent
ROOT = Path(__file__).parents[1]
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


def run_clean(command: list[object], folder: Path) -> str:
    """What a command prints, without the repository on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["ENCORE_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that is removed at once: pytest's own outlive three runs, and PyTorch is large."""
    with tempfile.TemporaryDirectory(prefix="encore-wheel-") as name:
        yield Path(name)


@pytest.mark.slow
def test_the_wheel_runs_the_example_of_the_readme_in_a_clean_environment(folder: Path) -> None:
    source = folder / "source"  # a build in the repository would put files of earlier builds into the wheel
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run_clean([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source], folder)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    run_clean([sys.executable, "-m", "venv", folder / "venv"], folder)
    python, encore_command = folder / "venv/bin/python", folder / "venv/bin/encore"
    run_clean([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel], folder)

    found = run_clean([python, "-c", "import encore; print(encore.__file__)"], folder)
    assert Path(found.strip()).is_relative_to(folder / "venv")
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "example.py").write_text(example)
    assert run_clean([python, "example.py"], folder).startswith("Encore: Sequential (fused lowering)")
    assert "compare" in run_clean([encore_command, "--help"], folder)
    assert f'"encore": "{encore.__version__}"' in run_clean([encore_command, "env", "--json"], folder)
