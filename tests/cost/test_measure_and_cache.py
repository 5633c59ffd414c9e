"""Measured bytes are the allocator's, measurements survive the process, and a damaged file costs a warning only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import encore
from encore.cached_files import read_record, write_record
from encore.measurements import MachineCache, machine_key


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
    assert read_record(path) == {"machine": machine_key(), "measurements": {"mine": 1, "other": 2}}


def test_what_another_machine_measured_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    theirs = MachineCache(path, "another machine")
    theirs.put("a", 1.5)
    theirs.save()
    mine = MachineCache(path)
    with pytest.warns(UserWarning, match="has measurements of another machine; measuring again"):
        assert mine.get("a") is None
    mine.put("b", 2.5)
    mine.save()  # without a second warning, which would be an error
    assert read_record(path) == {"machine": machine_key(), "measurements": {"b": 2.5}}


@pytest.mark.parametrize(
    "content",
    ["{", "[1, 2]", '{"a": 1}', '{"machine": "", "measurements": {"a": "text"}}', "\x00\x01", "", "[" * 100_000],
)
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cache.json"
    path.write_text(content)
    cache = MachineCache(path)
    with pytest.warns(UserWarning, match="measuring again"):
        assert cache.get("a") is None
    cache.put("a", 1.0)
    cache.save()
    assert MachineCache(path).get("a") == 1


def test_a_number_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    cache = MachineCache(path)
    cache.put("a", 1.5)
    cache.save()
    path.write_text(path.read_text().replace("1.5", "2.5"))
    with pytest.warns(UserWarning, match="is damaged.*measuring again"):
        assert MachineCache(path).get("a") is None


NO_MEASUREMENTS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, -1, -0.5, 1e300, 10**400, True, "text", None, [1])


def test_what_cannot_be_a_measurement_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    entries = {str(number): number for number in NO_MEASUREMENTS}
    write_record(path, {"machine": machine_key(), "measurements": {**entries, "right": 0.5, "none": 0}})
    cache = MachineCache(path)
    assert [cache.get(key) for key in entries] == [None] * len(entries)
    assert (cache.get("right"), cache.get("none")) == (0.5, 0)
    assert cache.matching(("",)) == {"right": 0.5, "none": 0}


def test_what_cannot_be_a_measurement_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    cache = MachineCache(path)
    for number in (math.nan, math.inf, -1.0, 2.0):
        cache.put(str(number), number)
    cache.save()
    assert read_record(path)["measurements"] == {"2.0": 2.0}


def test_a_file_that_takes_no_measurements_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = MachineCache(tmp_path / "file" / "cache.json")
    cache.put("a", 1.0)
    with pytest.warns(UserWarning, match="measurements cannot be written to"):
        cache.save()
    assert cache.get("a") == 1
