"""Compiling on first use: kept on disk, by one process at a time, and refused clearly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from encore.kernels import BuildError, build

TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources of its own, and a cache of its own."""
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def test_compiled_once_and_again_when_the_source_changes(sources: Path) -> None:
    (sources / "tiny.cpp").write_text(TINY)
    assert build.library("tiny").answer() == 42
    (first,) = (sources / "cache" / "native").glob("*.so")
    changed = first.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library("tiny").answer() == 42
    assert first.stat().st_mtime_ns == changed
    (sources / "tiny.cpp").write_text(TINY.replace("42", "43"))
    build.library.cache_clear()
    assert build.library("tiny").answer() == 43
    assert len(list((sources / "cache" / "native").glob("*.so"))) == 2


def test_a_refusal_is_quoted(sources: Path) -> None:
    (sources / "wrong.cpp").write_text("int main() { return nonsense; }\n")
    with pytest.raises(BuildError, match=r"refused wrong\.cpp: .*nonsense"):
        build.library("wrong")


def test_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (sources / "tiny.cpp").write_text(TINY)
    with pytest.raises(BuildError, match="no-such-compiler is not on the path"):
        build.library("tiny")


@pytest.mark.slow
def test_processes_do_not_race(sources: Path) -> None:
    (sources / "tiny.cpp").write_text(TINY)
    program = (
        f"from encore.kernels import build; build.__file__ = {str(sources / 'build.py')!r}; "
        "print(build.library('tiny').answer())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]  # fmt: skip
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 3
    assert len(list((sources / "cache" / "native").glob("*.so"))) == 1


def test_without_a_compiler_layers_warn_once_and_run(tmp_path: Path) -> None:
    program = (
        "import warnings, torch, encore\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        encore.nn.LSTM(3, 4, stash='lean')(torch.randn(5, 2, 3))[0].sum().backward()\n"
        "ours = [str(warning.message) for warning in seen if 'encore' in str(warning.message)]\n"
        "assert len(ours) == 1 and 'C++ compiler' in ours[0], ours\n"
    )
    environment = {**os.environ, "CXX": "no-such-compiler", "ENCORE_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
