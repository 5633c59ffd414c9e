"""The demo at a size that takes seconds: its numbers agree with what it prints, and eager and Encore agree."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from encore.units import bytes_text
from examples import demo
from support.browser import DESKTOP, find, nothing_went_wrong, resize, shot, texts

HELP = """\
usage: python -m examples.demo [-h] [--steps N] [--output FOLDER] [--json]

Train a translator in eager and, in half of the memory, through Encore.

options:
  -h, --help       show this help message and exit
  --steps N        training steps of either side (default: 200)
  --output FOLDER  where the page goes (default: encore-demo)
  --json           print the numbers as JSON
"""

TINY = {"batch_size": 16, "hidden": 16, "layers": 1, "steps": 6}


def broken(model: nn.Module) -> nn.Module:
    raise RuntimeError("no compiler\nat all")


QUICK_PEERS = {name: peer for name, peer in demo.PEERS.items() if "budget" not in name}
"""Those that take no compilation."""


@pytest.fixture(scope="module")
def found() -> Iterator[demo.Demo]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "PEERS", {**QUICK_PEERS, "broken": broken})
        yield demo.run(steps=6, sizes=TINY, budget="70%")


def test_losses_are_the_same_up_to_rounding(found: demo.Demo) -> None:
    assert found.loss_gap < 1e-3
    assert found.same_curve
    assert found.drift < 1e-3
    assert found.problems == []
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
    assert all(peer in text for peer in QUICK_PEERS)
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
    assert f"{found.times.ratio:.2f}x (median of 5 interleaved steps" in text
    assert "Encore: Translator" in text
    assert "  broken: failed: RuntimeError: no compiler\n" in text


def test_a_difference_is_not_hidden(found: demo.Demo) -> None:
    losses = (*found.encore_losses[:-1], found.encore_losses[-1] + 0.5)
    text = str(dataclasses.replace(found, encore_losses=losses, identical=False, predicted_peak=found.encore_peak // 2))
    assert "NOT the same curve: losses differ by up to 0.5" in text
    assert "BELOW the measured one" in text


def test_losses_that_roundings_do_not_explain_are_a_problem(found: demo.Demo) -> None:
    losses = (*found.encore_losses[:-1], found.encore_losses[-1] + 2 * found.tolerance)
    (problem,) = dataclasses.replace(found, encore_losses=losses, identical=False).problems
    assert problem.startswith("the loss curves are not the same: up to ")
    for place in range(len(found.encore_losses)):
        with_nan = (*found.encore_losses[:place], math.nan, *found.encore_losses[place + 1 :])
        worse = dataclasses.replace(found, encore_losses=with_nan, identical=False)
        assert not worse.same_curve
        assert json.loads(worse.to_json())["loss_gap"] is None


def test_the_command_fails_where_a_promise_was_not_kept(
    found: demo.Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "run", lambda steps: dataclasses.replace(found, limit=1024))
    assert demo.main(["--output", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "encore: the budget of 1.00 KiB was not kept: " in told.err
    assert "NOT KEPT" in told.out
    assert (tmp_path / "report.html").exists(), "there is something to look at"


def test_a_folder_that_cannot_be_is_told_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "run", lambda steps: pytest.fail("it trained"))
    (tmp_path / "file").write_text("")
    assert demo.main(["--output", str(tmp_path / "file")]) == 1
    assert "file is a file; name another one" in capsys.readouterr().err


def test_a_browser_opens_the_page(found: demo.Demo, browser: Any, tmp_path: Path) -> None:
    page, *_ = found.write(tmp_path)
    resize(browser, DESKTOP)
    browser.get(page.as_uri())
    total = bytes_text(found.report.resident + found.report.planned.step_peak)
    assert texts(browser, "#planned .peak-label") == [f"peak {total}"]
    assert texts(browser, "#planned .budget-label") == [f"budget {bytes_text(found.limit)}"]
    assert {"this plan", "eager", "Encore", *QUICK_PEERS} <= set(texts(browser, "#plans text.halo"))
    assert len(find(browser, "#table tbody tr")) > 0
    shot(browser, tmp_path / "page.png")
    nothing_went_wrong(browser)


@pytest.mark.slow
def test_two_hundred_steps_in_half_of_the_memory_give_the_same_curve_and_a_translator() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "PEERS", QUICK_PEERS)
        found = demo.run(200, demo.SIZES, "50%")
    assert found.problems == []
    assert found.loss_gap < 1e-3
    assert 0 < found.drift < 0.1  # two hundred steps let a rounding grow
    assert found.encore_peak <= found.predicted_peak
    assert found.eager_losses[-1] < 0.1 * found.eager_losses[0]
    assert found.encore_scores == pytest.approx(dict(found.eager_scores), abs=0.02)
    assert found.encore_scores["exact match"] > 0.5


def test_the_command_prints_json(
    found: demo.Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "run", lambda steps: found if steps == 6 else None)
    assert demo.main(["--steps", "6", "--json", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()
    told = capsys.readouterr()
    numbers = json.loads(told.out)
    assert numbers["encore_demo"] == 3
    assert numbers["problems"] == []
    assert numbers["failures"] == {"broken": "RuntimeError: no compiler"}
    assert numbers["steps"] == 6
    assert numbers["loss_gap"] == found.loss_gap
    assert f"to look at: {tmp_path / 'report.html'}" in told.err


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "122")
    with pytest.raises(SystemExit) as left:
        demo.main(["--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out == HELP
    assert f"(default: {demo.STEPS})" in HELP


def test_demo_needs_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--steps", "1"]) == 1
    assert "at least 2" in capsys.readouterr().err


def test_arguments_that_cannot_be_read_exit_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        demo.main(["--steps", "many"])
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("usage: python -m examples.demo")
