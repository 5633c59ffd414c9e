"""Measured bytes are the allocator's, measurements survive the process, and a damaged file costs a warning only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import encore
from encore.cost.cache import MachineCache, machine_key


def test_peak_and_left_are_exact() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(500, dtype=torch.uint8)
        del first
        return torch.cat([second, second[:10]])

    measured = encore.measure(call)
    assert measured.step_peak == 1500
    assert measured.left == 510
    assert measured.result.shape == (510,)
    assert measured.seconds > 0


def test_what_was_there_before_is_not_counted() -> None:
    held = torch.empty(4096, dtype=torch.uint8)
    assert encore.measure(lambda: held[:10]).step_peak == 0


def test_an_exception_ends_the_recording() -> None:
    def fail() -> None:
        torch.empty(8)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        encore.measure(fail)
    assert encore.measure(lambda: torch.empty(8, dtype=torch.uint8)).left == 8


def test_entries_survive(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache.json"
    cache = MachineCache(path)
    assert cache.get("a") is None
    cache.put("a", 1.5)
    cache.save()
    assert MachineCache(path).get("a") == 1.5
    assert [file.name for file in path.parent.iterdir()] == ["cache.json"], "no temporary file stays"


def test_saving_keeps_what_another_process_added(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    mine, other = MachineCache(path), MachineCache(path)
    mine.put("mine", 1)
    other.put("other", 2)
    other.save()
    mine.save()
    assert json.loads(path.read_text()) == {"machine": machine_key(), "measurements": {"mine": 1, "other": 2}}


def test_what_another_machine_measured_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    theirs = MachineCache(path, "another machine")
    theirs.put("a", 1.5)
    theirs.save()
    mine = MachineCache(path)
    with pytest.warns(UserWarning, match="holds measurements of another machine; measuring again"):
        assert mine.get("a") is None
    mine.put("b", 2.5)
    mine.save()  # without a second warning, which would be an error
    assert json.loads(path.read_text()) == {"machine": machine_key(), "measurements": {"b": 2.5}}


@pytest.mark.parametrize(
    "content", ["{", "[1, 2]", '{"a": 1}', '{"machine": "", "measurements": {"a": "text"}}', "\x00\x01"]
)
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cache.json"
    path.write_text(content)
    cache = MachineCache(path)
    with pytest.warns(UserWarning, match="measuring again"):
        assert cache.get("a") is None
