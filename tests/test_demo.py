"""The demo at a size that takes seconds: its numbers agree with what it prints, and eager and Encore agree."""

from __future__ import annotations

import dataclasses
import json

import pytest

from encore import demo
from encore.cli import main

TINY = {"batch_size": 4, "hidden": 16, "steps": 3}


@pytest.fixture(scope="module")
def found() -> demo.Demo:
    return demo.run(steps=6, sizes=TINY)


def test_losses_are_the_same_up_to_rounding(found: demo.Demo) -> None:
    assert found.loss_gap < 1e-5
    assert len(found.eager_losses) == 6
    assert found.eager_losses[-1] < found.eager_losses[0]


def test_the_prediction_holds(found: demo.Demo) -> None:
    assert found.encore_peak <= found.predicted_peak <= 1.01 * found.encore_peak


def test_what_is_printed(found: demo.Demo) -> None:
    text = str(found)
    assert "written as a Python loop (batch_size 4, hidden 16, steps 3), 6 training steps" in text
    assert ("identical bit for bit" in text) if found.identical else ("the same curve: losses differ by" in text)
    assert f"{found.eager_losses[-1]:.7f}" in text
    assert f"{found.turns.ratio:.2f}x (median of 5 in turns" in text
    assert "Encore: LanguageModel" in text


def test_a_difference_is_not_hidden(found: demo.Demo) -> None:
    losses = (*found.encore_losses[:-1], found.encore_losses[-1] + 0.5)
    text = str(dataclasses.replace(found, encore_losses=losses, identical=False, predicted_peak=found.encore_peak // 2))
    assert "NOT the same curve: losses differ by up to 0.5" in text
    assert "BELOW the measured one" in text


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    whole = demo.run
    monkeypatch.setattr(demo, "run", lambda steps: whole(steps, TINY))
    assert main(["demo", "--steps", "2", "--json"]) == 0
    told = capsys.readouterr()
    numbers = json.loads(told.out)
    assert numbers["encore_demo"] == 1
    assert numbers["steps"] == 2
    assert numbers["loss_gap"] < 1e-5
    assert "training 2/2  loss: eager" in told.err
