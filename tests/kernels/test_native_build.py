"""Compiling on first use: kept on disk, by one process at a time, and failing clearly."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from encore.kernels import BuildError, build

pytestmark = pytest.mark.usefixtures("own_layers")

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
    with pytest.raises(BuildError, match=r"rejected wrong\.cpp: .*nonsense"):
        build.library("wrong")


def test_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (sources / "tiny.cpp").write_text(TINY)
    with pytest.raises(BuildError, match="no-such-compiler is not on the path"):
        build.library("tiny")


LOAD_EACH = """
import os, sys
from encore.kernels import build
build.__file__ = sys.argv[1]
for cache in sys.argv[2:]:
    print(cache, flush=True)
    os.environ["ENCORE_CACHE_DIR"] = cache
    build.library.cache_clear()
    assert build.library("tiny").answer() == 42
"""


def test_a_library_that_was_cut_off_is_compiled_again(sources: Path) -> None:
    """In a process of its own: the system maps such a file without an error, and kills the process that reads it."""
    (sources / "tiny.cpp").write_text(TINY)
    build.library("tiny")
    caches = []
    for share in (0, 0.02, 0.1, 0.3, 0.6, 0.9, 0.999):
        caches.append(sources / f"cut at {share}")
        shutil.copytree(sources / "cache", caches[-1])
        for made in (caches[-1], caches[-1] / "native"):
            made.chmod(0o700)
        (library,) = caches[-1].glob("native/*.so")
        content = library.read_bytes()
        library.write_bytes(content[: int(len(content) * share)])
    program = [sys.executable, "-c", LOAD_EACH, str(sources / "build.py"), *map(str, caches)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr[-2000:])
    for cache in caches:
        assert len(list(cache.glob("native/*.so"))) == 1
        assert (cache / "native" / library.name).stat().st_size > len(content) // 2


def test_a_library_that_another_user_could_have_written_is_not_loaded(sources: Path) -> None:
    (sources / "tiny.cpp").write_text(TINY)
    build.library("tiny")
    (library,) = (sources / "cache").glob("native/*.so")
    library.unlink()
    library.write_bytes(b"theirs")
    library.chmod(0o666)
    build.library.cache_clear()
    with pytest.warns(UserWarning, match="is not trusted"):
        assert build.library("tiny").answer() == 42
    assert library.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_library_that_cannot_be_kept_is_compiled_for_the_process(
    sources: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(build, "write_cached", refuse)
    (sources / "tiny.cpp").write_text(TINY)
    with pytest.warns(UserWarning, match=f"cannot be written to .*{os.strerror(code)}"):
        assert build.library("tiny").answer() == 42
    assert list((sources / "cache").glob("native/*.so")) == []


@pytest.mark.parametrize("name", ["it's", 'a "b"', "köln 東京", "bytes\udcff", "a;b$c"])
def test_a_cache_of_any_name(sources: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(sources / name))
    (sources / "tiny.cpp").write_text(TINY)
    assert build.library("tiny").answer() == 42
    assert len(list((sources / name).glob("native/*.so"))) == 1


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
