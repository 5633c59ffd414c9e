"""`encore compare` on small models: every system, failures as rows, budgets, exit codes, JSON and pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from encore.cli import main
from encore.compare import run, systems
from encore.compare.contest import NO_TIME
from encore.compare.run import CHECKPOINT, DEFAULT, LOWEST, NO_BLOCKS, ModelComparison, compare_systems
from encore.errors import EncoreError, OptionError

TARGETS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.layers(x)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))), (torch.randn(32, 16),)


def on_meta():
    with torch.device("meta"):
        return blocks()
"""
SHORT = 1e-9
"""Minutes in which only what always runs takes part."""


class Loss(nn.Module):
    """Returns a loss and something that has no gradient."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        found = self.layers(x)
        return {"loss": found.square().mean() * scale, "sign": found.detach().sign()}


def compared(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **more: Any) -> ModelComparison:
    return compare_systems("target", model, args, kwargs or {}, minutes=SHORT, rounds=2, **more)


def rows(found: ModelComparison) -> dict[str, Any]:
    return {one.system: one for one in found.outcomes}


def test_a_module_with_blocks_and_a_budget() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = compared(model, (torch.randn(64, 16),), budget="70%")
    outcomes = rows(found)
    ran = {system for system, one in outcomes.items() if one.ran}
    assert ran == {"eager", CHECKPOINT, DEFAULT, "Encore, budget='70%'"}
    assert outcomes["torch.compile"].left_out == outcomes[LOWEST].left_out == NO_TIME
    assert found.blocks == 3
    assert found.budget is not None
    for system in ran:
        assert outcomes[system].gradient_difference < 1e-5
        assert outcomes[system].gradient_error is not None
        assert outcomes[system].gradient_error < 1e-5
    assert found.resident + outcomes["Encore, budget='70%'"].peak <= found.budget
    assert outcomes[CHECKPOINT].peak < outcomes["eager"].peak
    assert found.recommendation is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_among_other_outputs_without_blocks() -> None:
    found = compared(Loss(), (torch.randn(8, 16),), {"scale": 2.0})
    outcomes = rows(found)
    assert outcomes[CHECKPOINT].left_out == NO_BLOCKS
    assert outcomes[DEFAULT].gradient_difference < 1e-5
    assert f"{CHECKPOINT}: left out: {NO_BLOCKS}" in str(found)


def test_a_model_that_draws_is_not_compared_with_float64() -> None:
    outcomes = rows(compared(Loss(dropout=0.5), (torch.randn(8, 16),), {"scale": 2.0}))
    assert outcomes["eager"].gradient_error is None
    assert outcomes[DEFAULT].gradient_difference < 1e-5


def test_a_function_with_weights_that_it_closes_over() -> None:
    weight = torch.randn(16, 16, requires_grad=True)
    found = compared(lambda x: (x @ weight).tanh(), (torch.randn(64, 16),))
    outcomes = rows(found)
    assert found.resident == 64 * 16 * 4 + weight.nbytes
    assert outcomes[DEFAULT].gradient_difference < 1e-5
    assert outcomes[DEFAULT].peak == outcomes[DEFAULT].predicted


def failing(message: str) -> Callable[[Any], Any]:
    def prepare(model: Any) -> Any:
        raise RuntimeError(message)

    return prepare


@pytest.mark.parametrize("failed", ["eager", CHECKPOINT])
def test_a_system_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, failed: str) -> None:
    monkeypatch.setattr(systems, "eager" if failed == "eager" else "checkpointed", failing("no memory\nat all"))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)))
    found = compared(model, (torch.randn(8, 16),))
    outcomes = rows(found)
    assert outcomes[failed].failure == "RuntimeError: no memory"
    assert outcomes[DEFAULT].ran
    assert math.isnan(outcomes[DEFAULT].against_eager) is (failed == "eager")
    assert f"{failed}: failed: RuntimeError: no memory" in str(found)
    data = json.loads(found.to_json())
    assert {row["system"]: row["against_eager"] for row in data["outcomes"]}[DEFAULT] is None or failed != "eager"
    assert found.recommendation is not None


def test_a_model_that_no_system_can_train() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(EncoreError, match=r"no system can train target; eager fails with OptionError: no output"):
        compared(frozen, (torch.randn(2, 4),))


def test_the_meta_device_is_rejected() -> None:
    with pytest.raises(OptionError, match=r"on the meta device.*`encore estimate`"):
        compared(nn.Linear(4, 4, device="meta"), (torch.randn(2, 4),))


@pytest.fixture
def _targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(run, "SETTINGS", (0.5,))
    (tmp_path / "targets_of_test_run.py").write_text(TARGETS)


COMPARE = ["compare", "targets_of_test_run:blocks", "--minutes", str(SHORT)]


@pytest.mark.usefixtures("_targets")
def test_the_command_prints_json_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--budget", "1GiB", "--json", "--plot", "found.png"]) == 0
    told = capsys.readouterr()
    data = json.loads(told.out)
    assert data["encore_compare"] == 1
    assert data["target"] == "targets_of_test_run:blocks"
    assert data["blocks"] == 3
    assert data["fits"] is True
    assert data["recommendation"]["system"]
    assert "eager: first step and warm-up" in told.err
    assert Path("found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_targets")
def test_a_budget_that_nothing_fits_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--budget", "1KiB"]) == 2
    told = capsys.readouterr()
    assert "Encore, budget='1KiB': failed: BudgetError: a budget of 1024 bytes" in told.out
    assert "; nothing fits the budget of 1.00 KiB)" in told.out
    assert "encore: a budget of 1024 bytes" in told.err


@pytest.mark.usefixtures("_targets")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--budget", "lots"], "budget='lots' cannot be read"),
        (["--minutes", "0"], "--minutes 0 is not accepted; give a positive number"),
        (["--plot", "nowhere/x.png"], "nowhere/x.png cannot be written"),
    ],
)
def test_arguments_are_checked_before_anything_runs(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "targets_of_test_run:no_such_factory", *argv]) == 1
    assert capsys.readouterr().err.startswith(f"encore: {message}")
    assert main(["compare", "targets_of_test_run:on_meta"]) == 1
    assert "on the meta device" in capsys.readouterr().err


@pytest.mark.usefixtures("_targets")
def test_a_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*COMPARE, "--plot", "found.png"]) == 1
    assert "pip install 'encore-torch[plots]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("_targets")
def test_every_system_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "targets_of_test_run:blocks", "--budget", "80%", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    outcomes = {row["system"]: row for row in data["outcomes"]}
    assert list(outcomes) == [
        "eager", CHECKPOINT, "torch.compile", "activation_memory_budget 0.5", DEFAULT, "Encore, budget='80%'", LOWEST,
    ]  # fmt: skip
    for row in outcomes.values():
        assert not row["failure"]
        assert not row["left_out"]
        assert row["peak"] > 0
        assert row["gradient_difference"] < 1e-5
        assert row["gradient_error"] < 1e-5
    assert data["resident"] + outcomes["Encore, budget='80%'"]["peak"] <= data["budget"]
    assert outcomes[LOWEST]["peak"] <= outcomes[DEFAULT]["peak"]
