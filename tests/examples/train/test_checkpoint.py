"""Checkpoint files: whole or not there, checked, two kept, and never code."""

from __future__ import annotations

import os
import pickle
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.train.checkpoint import FORMAT, Checkpoints, read_state, write_state
from examples.train.errors import CheckpointError

STATE: dict[str, Any] = {"weights": {"w": torch.arange(1000.0)}, "losses": [1.0, 0.5], "note": "grün", "nothing": None}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path / "deep" / "run") as opened:
        yield opened


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.directory.iterdir())


def test_what_is_written_is_read(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest() is None
    checkpoints.write(7, STATE)
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 7
    assert torch.equal(found.state["weights"]["w"], STATE["weights"]["w"])
    assert {**found.state, "weights": None} == {**STATE, "weights": None}


def test_the_newest_two_are_kept(checkpoints: Checkpoints) -> None:
    for step in (5, 10, 99_999_999, 100_000_000):
        checkpoints.write(step, STATE)
    assert names(checkpoints) == ["step-100000000.checkpoint", "step-99999999.checkpoint"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 100_000_000


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "is truncated"),
    "empty": (empty, "is truncated"),
    "a bit": (flip_a_bit, "its checksum is wrong"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_told_of_and_its_elder_used(checkpoints: Checkpoints, damage: str) -> None:
    elder, newest = checkpoints.write(5, STATE), checkpoints.write(10, STATE)
    spoil, message = DAMAGES[damage]
    spoil(newest)
    with pytest.warns(UserWarning, match=message) as told:
        found = checkpoints.newest()
    assert found is not None
    assert found.path == elder
    assert "the run goes on from step-00000005.checkpoint" in str(told[0].message)
    assert names(checkpoints) == ["step-00000005.checkpoint", "step-00000010.checkpoint.damaged"]


def test_where_all_are_damaged_nothing_starts_over(checkpoints: Checkpoints) -> None:
    for step in (5, 10):
        truncate(checkpoints.write(step, STATE))
    with pytest.raises(CheckpointError, match=r"00010.checkpoint is truncated.*00005.checkpoint is truncated"):
        checkpoints.newest()
    assert len(names(checkpoints)) == 2


def test_one_of_another_format_is_not_damaged(checkpoints: Checkpoints) -> None:
    checkpoints.write(5, STATE)
    path = checkpoints.write(10, STATE)
    torch.save({**torch.load(path), "format": FORMAT + 1}, path)
    with pytest.raises(CheckpointError, match="has format 3, and this Encore reads format 2"):
        checkpoints.newest()
    assert path.exists()


class Hostile:
    """Unpickled carelessly, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_code_is_run(tmp_path: Path, checkpoints: Checkpoints) -> None:
    proof = tmp_path / "proof"
    path = checkpoints.write(3, {"weights": Hostile(proof)})
    with pytest.raises(CheckpointError, match="does not hold a state"):
        read_state(path)
    assert not proof.exists()
    pickle.loads(pickle.dumps(Hostile(proof)))
    assert proof.exists()


def test_something_else_than_a_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-1.checkpoint"
    with path.open("wb") as file:
        write_state(file, STATE)
    read_state(path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_state(tmp_path / "step-2.checkpoint")


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """No file may grow beyond 20,000 bytes once it is called: the kernel refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_fails_leaves_the_elders_alone(checkpoints: Checkpoints, full_disk: Callable[[], None]) -> None:
    for step in (5, 10):
        checkpoints.write(step, STATE)
    full_disk()
    with pytest.raises(CheckpointError, match=r"step 15 cannot be written .*File too large; step-00000010.* untouched"):
        checkpoints.write(15, {"weights": torch.zeros(10_000)})
    assert names(checkpoints) == ["step-00000005.checkpoint", "step-00000010.checkpoint"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 10


def test_what_a_kill_left_half_done_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "step-00000005.checkpoint.partial").write_bytes(b"half")
    with Checkpoints(tmp_path) as checkpoints:
        assert names(checkpoints) == []


def test_a_directory_serves_one_run_at_a_time(checkpoints: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match="another run is writing"), Checkpoints(checkpoints.directory):
        pass


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"), Checkpoints(tmp_path / "file" / "run"):
        pass
