"""The schema of what suites write: it says no where it should, and a run for real keeps to it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.command import main
from benchmarks.schema import Layout
from support.json_schema import violations

LAYOUT = Layout("made_up", 7)


@dataclass(frozen=True)
class Row:
    name: str
    size: int
    ratio: float | None
    sizes: tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class Made:
    rows: dict[str, tuple[Row, ...]]
    quick: bool = True


def told(**changed: Any) -> Any:
    row = {**asdict(Row("a", 1, 0.5)), **changed}
    return json.loads(LAYOUT.to_json(asdict(Made({"nmt": ()})))) | {"rows": {"nmt": [json.loads(json.dumps(row))]}}


def test_what_is_written_keeps_to_it() -> None:
    assert violations(told(), LAYOUT.schema(Made)) == []
    assert violations(told(ratio=None), LAYOUT.schema(Made)) == []


@pytest.mark.parametrize(
    "wrong", [{"name": 1}, {"size": 1.5}, {"size": True}, {"ratio": "x"}, {"sizes": [1]}, {"b": 1}]
)
def test_what_is_not_of_the_layout_is_refused(wrong: dict[str, Any]) -> None:
    assert len(violations(told(**wrong), LAYOUT.schema(Made))) == 1
    assert violations({**told(), "made_up": 6}, LAYOUT.schema(Made)) == ["$.made_up is 6, not 7"]
    assert violations({"made_up": 7, "rows": {}}, LAYOUT.schema(Made)) == ["$.quick is missing"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_in_json_is_null(number: float) -> None:
    text = LAYOUT.to_json(asdict(Made({"nmt": (Row("a", 1, number),)})))
    assert json.loads(text)["rows"]["nmt"][0]["ratio"] is None
    assert violations(json.loads(text), LAYOUT.schema(Made)) == []


@pytest.mark.parametrize("suite", results.SUITES)
def test_the_command_prints_the_schema_of_every_suite(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([suite, "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == results.SUITES[suite].found.schema()
    assert {"machine", "quick", "seconds"} < set(printed["required"])


@pytest.mark.slow
def test_a_quick_run_of_echo_writes_what_its_schema_says(tmp_path: Path) -> None:
    file = tmp_path / "echo.json"
    assert main(["echo", "--quick", "--json", str(file), "--plots", str(tmp_path)]) == 0
    found = json.loads(file.read_text())
    assert violations(found, results.SUITES["echo"].found.schema()) == []
    assert list(found["outcomes"]) == ["transformer", "resnet", "nmt", "speech"]
    for outcomes in found["outcomes"].values():
        assert [one["system"] for one in outcomes if one["failure"]] == []
        assert all(one["peak"] > 0 and one["seconds"] > 0 for one in outcomes if not one["left_out"])
    assert found["seconds"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"echo.json", "echo.png", "echo.html"}
