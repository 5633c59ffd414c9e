"""The demo at a size that takes seconds: its numbers agree with what it prints, and eager and Encore agree."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from encore import demo
from encore.cli import main

TINY = {"batch_size": 16, "hidden": 16, "layers": 1, "steps": 6}


@pytest.fixture(scope="module")
def found() -> demo.Demo:
    return demo.run(steps=6, sizes=TINY, budget="70%")


def test_losses_are_the_same_up_to_rounding(found: demo.Demo) -> None:
    assert found.loss_gap < 1e-5
    assert len(found.eager_losses) == 6
    assert found.eager_losses[-1] < found.eager_losses[0]


def test_the_prediction_holds(found: demo.Demo) -> None:
    assert found.encore_peak <= found.predicted_peak <= 1.01 * found.encore_peak


def test_the_budget_is_kept_and_less_than_eager_takes(found: demo.Demo) -> None:
    assert found.within_budget
    assert found.limit < found.report.resident + found.eager_peak
    assert found.encore_peak < found.eager_peak


def test_both_sides_score_the_same(found: demo.Demo) -> None:
    assert set(found.encore_scores) == {"exact match", "BLEU"}
    assert found.encore_scores == pytest.approx(dict(found.eager_scores), abs=1e-3)


def test_page_picture_and_snapshot_are_written(found: demo.Demo, tmp_path: Path) -> None:
    page, picture, snapshot = found.write(tmp_path / "new")
    text = page.read_text()
    assert "checkpoint per block" in text
    assert "Translator" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert set(pickle.loads(snapshot.read_bytes())) >= {"segments", "device_traces"}


def test_what_is_printed(found: demo.Demo) -> None:
    text = str(found)
    assert "with attention (batch_size 16, hidden 16, layers 1, steps 6), 6 training steps, budget 70%" in text
    assert "with parameters: kept" in text
    assert "translation:" in text
    assert ("identical bit for bit" in text) if found.identical else ("the same curve: losses differ by" in text)
    assert f"{found.eager_losses[-1]:.7f}" in text
    assert f"{found.turns.ratio:.2f}x (median of 5 in turns" in text
    assert "Encore: Translator" in text


def test_a_difference_is_not_hidden(found: demo.Demo) -> None:
    losses = (*found.encore_losses[:-1], found.encore_losses[-1] + 0.5)
    text = str(dataclasses.replace(found, encore_losses=losses, identical=False, predicted_peak=found.encore_peak // 2))
    assert "NOT the same curve: losses differ by up to 0.5" in text
    assert "BELOW the measured one" in text


def test_the_command_prints_json(
    found: demo.Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "run", lambda steps: found if steps == 6 else None)
    assert main(["demo", "--steps", "6", "--json", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
    told = capsys.readouterr()
    numbers = json.loads(told.out)
    assert numbers["encore_demo"] == 2
    assert numbers["steps"] == 6
    assert numbers["loss_gap"] < 1e-5
    assert f"to look at: {tmp_path / 'report.html'}" in told.err
