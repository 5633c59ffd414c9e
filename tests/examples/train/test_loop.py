"""A run from the command line: what it prints, what it measures, and how it ends when training diverges."""

from __future__ import annotations

import json

import pytest

from encore.fates import Link
from examples.train.command import main
from examples.train.loop import train
from examples.train.outcome import Outcome
from examples.train.settings import Settings
from examples.train.state import Training

SIZES = {"hidden": 16, "layers": 1, "heads": 2, "steps": 20, "batch_size": 16}
TINY = ["transformer", *(f"--size={name}={size}" for name, size in SIZES.items())]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return train(Settings("transformer", dict(SIZES), budget="70%", lowering="eager", every=4), steps=8)


def test_the_numbers_of_a_run(outcome: Outcome) -> None:
    memory = outcome.memory
    assert memory is not None
    assert memory.measured is not None
    assert memory.predicted is not None
    assert memory.unplanned is not None
    assert memory.measured <= memory.predicted <= 1.01 * memory.measured
    assert memory.resident + memory.predicted <= 0.7 * (memory.resident + memory.unplanned)
    assert len(outcome.losses) == 8
    assert outcome.losses[-1] < outcome.losses[0]
    assert outcome.step_seconds is not None
    assert outcome.examples_per_second == 16 / outcome.step_seconds


def test_a_run_whose_feature_maps_go_to_disk_has_the_losses_of_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below what recomputing can reach, in the eager lowering; and the same when it goes on with its plan."""
    fast = Link(store=1e-12, load=1e-12, call=1e-9, pace=1.0, depth=64)
    monkeypatch.setattr("encore.compiler.session.link_to", lambda tier: fast)
    sizes = {**SIZES, "hidden": 32, "batch_size": 64}
    asked = Settings("transformer", dict(sizes), budget="min", lowering="eager", tiers="disk")
    plain = Training(Settings("transformer", dict(sizes), eager=True))
    expected = [plain.step() and plain.losses[-1] for _ in range(3)]
    moving = Training(asked)
    assert [moving.step() and moving.losses[-1] for _ in range(3)] == expected
    assert moving.report().planned.moved > 0
    again = Training(asked)
    again.plan = moving.plan
    again._compile()
    assert [again.step() and again.losses[-1] for _ in range(3)] == expected
    assert again.report().planned.moved == moving.report().planned.moved


def test_the_optimizer_allocates_nothing_that_the_prediction_does_not_know(outcome: Outcome) -> None:
    """The measured step ends with the update, and holds Adam's two moments in what is resident."""
    assert outcome.memory is not None
    eager = train(Settings("transformer", dict(SIZES), eager=True), steps=2)
    assert eager.memory is not None
    assert eager.memory.resident == outcome.memory.resident


def test_as_json(outcome: Outcome) -> None:
    found = json.loads(outcome.to_json())
    assert found["encore_train"] == 1
    assert found["steps"] == 8
    assert found["loss"] == outcome.losses[-1]
    assert found["memory"]["budget"] == "70%"
    assert set(found["score"]) >= {"perplexity"}


def test_what_is_printed(outcome: Outcome) -> None:
    text = str(outcome)
    sizes = "batch_size 16, hidden 16, layers 1, heads 2, steps 20, dropout 0.1"
    assert text.startswith(f"transformer ({sizes}), 8 steps through Encore, Adam at ")
    for expected in ("held out        perplexity", " examples/s: ", "predicted ", " of a budget of 70%"):
        assert expected in text


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--eager", "--steps", "4", "--every", "2", "--json"]) == 0
    told = capsys.readouterr()
    json.loads(told.out)
    lines = told.err.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [f"transformer {step}/4" for step in (1, 2, 3, 4)]
    assert "perplexity" in lines[-1]
    assert lines[-1].endswith("examples/s")


def test_a_budget_out_of_reach_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--lowering", "eager", "--budget", "20KB"]) == 2
    assert "a budget of 20000 bytes" in capsys.readouterr().err


def test_a_run_that_diverges_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--eager", "--learning-rate", "1e38", "--steps", "50"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "training has diverged; start anew with a lower --learning-rate" in told
