"""Whoever writes a file writes it whole: an interrupt or a full disk leaves what was there, and nothing beside it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import encore
from benchmarks import plots, results
from benchmarks.command import main
from encore.measurements import MachineCache
from encore.plan.saved import SavedPlan
from encore.whole_files import check_file, check_folder, make_folder, replacing, write_whole
from examples.train.checkpoint import Checkpoints
from examples.train.history import History
from support.example_report import tower_plan


def shown() -> results.Results:
    return results.Results("echo", "text", "{}", "# Page", lambda: plots.budgets({"nmt": ()}))


def keep_measurements(folder: Path) -> None:
    cache = MachineCache(folder / "cache.json")
    cache.put("a", 1.0)
    cache.save()


def write_checkpoint(folder: Path) -> None:
    with Checkpoints(folder) as checkpoints:
        checkpoints.write(1, {})


def write_history(folder: Path) -> None:
    with History(folder, [1.0], {}):
        pass


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a text": lambda folder: write_whole(folder / "text", "new"),
    "a plan": lambda folder: SavedPlan("fused", ()).save(folder / "plan.json"),
    "a report's page": lambda folder: tower_plan().to_html(folder / "report.html"),
    "a report's picture": lambda folder: tower_plan().to_png(folder / "report.png"),
    "a report's snapshot": lambda folder: tower_plan().to_snapshot(folder / "report.pickle"),
    "a benchmark's page": lambda folder: shown().write_docs(),
    "a benchmark's picture": lambda folder: shown().write_plots(folder),
    "measurements": keep_measurements,
    "a checkpoint": write_checkpoint,
    "a run's history": write_history,
}


def interrupted(descriptor: int) -> NoReturn:
    raise KeyboardInterrupt


def full(descriptor: int) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    return tmp_path


def left_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("writer", WRITERS)
def test_an_interrupt_leaves_what_was_there(writer: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[writer](folder)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".json":  # measurements are read before they are written
            path.write_bytes(b"before")
    before = left_in(folder)
    assert before, "nothing was written"
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        WRITERS[writer](folder)
    assert left_in(folder) == before


def test_a_full_disk_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(encore.EncoreError, match=r"text cannot be written: No space left on device; make room"):
        write_whole(folder / "text", "new")
    assert left_in(folder) == {}


def test_a_link_stays_and_a_pipe_is_written_into(folder: Path) -> None:
    (folder / "docs" / "real").write_text("before")
    (folder / "link").symlink_to(folder / "docs" / "real")
    write_whole(folder / "link", "new")
    assert (folder / "link").is_symlink()
    assert (folder / "docs" / "real").read_text() == "new"
    assert write_whole("/dev/null", "nothing") == Path("/dev/null")
    assert Path("/dev/null").is_char_device()


def test_two_processes_do_not_write_into_the_same_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "text"
    with replacing(path) as mine:
        mine.write(b"mine")
        monkeypatch.setattr(os, "getpid", lambda: 0)
        with replacing(path) as theirs:
            theirs.write(b"theirs")
        assert path.read_bytes() == b"theirs"
    assert left_in(folder) == {"text": b"mine"}


def test_where_nothing_can_be_written_is_known_before(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(encore.OptionError, match="there is no folder"):
        check_file(folder / "nowhere" / "file")
    with pytest.raises(encore.OptionError, match="docs is a folder; name a file in it"):
        check_file(folder / "docs")
    with pytest.raises(encore.OptionError, match="file is a file; name another one"):
        check_folder(folder / "file" / "deep")
    check_folder(folder / "new" / "deep")
    assert not (folder / "new").exists(), "a question makes nothing"
    assert make_folder(folder / "new" / "deep").is_dir()


def test_a_benchmark_that_cannot_be_written_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "run", lambda suite, **_: shown())
    monkeypatch.setattr(os, "fsync", full)
    assert main(["echo", "--json", "found.json"]) == 1
    assert capsys.readouterr().err == (
        "encore: found.json cannot be written: No space left on device; make room, or name another place\n"
    )
    assert left_in(folder) == {}
