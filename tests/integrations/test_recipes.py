"""The examples of docs/hosts.md run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import encore
from support.host_loops import host_warnings, lightning_module
from support.host_models import build
from support.lightning_loop import import_lightning
from support.sharded_models import LanguageModel, batch, run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()


def recipe(title: str) -> str:
    """The first example below a heading, of either level."""
    found = re.search(rf"^##+ {title}\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def run(title: str, given: dict[str, Any]) -> dict[str, Any]:
    with host_warnings():
        exec(compile(recipe(title), title, "exec"), given)
    return given


@pytest.mark.slow
def test_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    model, batches = build("tagger")
    rows = [{name: tensor[row] for name, tensor in batches[0].items()} for row in range(4)]
    made = run("Hugging Face's Trainer", {"model": model, "data": rows})
    assert made["trainer"].state.global_step == 6
    assert encore.report(model).budget == 2**20


@pytest.mark.slow
def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = import_lightning()
    monkeypatch.chdir(tmp_path)
    model, batches = build("tagger")
    module = lightning_module(lightning, model)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    run("Lightning", {"module": module, "loader": loader})
    assert encore.report(module).budget == 2**20


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    model, batches = build("tagger")
    loader: Any = torch.utils.data.DataLoader(batches[:1], batch_size=None)  # type: ignore[arg-type]
    run("accelerate", {"model": model, "loader": loader, "torch": torch})
    assert encore.report(model).budget == 2**20
    assert encore.report(model).beside > 0


def fsdp2(rank: int) -> tuple[int, int]:
    """Run the recipe on one of two processes; return its budget, and what its step takes."""
    torch.manual_seed(0)
    model = LanguageModel()
    run("FSDP2", {"model": model, "loader": [batch(rank, step) for step in range(5)], "torch": torch})
    report = encore.report(model)
    return int(report.budget or 0), report.resident + report.planned.step_peak


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    for budget, taken in run_ranks(fsdp2, tmp_path):
        assert 0 < taken <= budget == 5 * 2**20


def test_before_there_are_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    run("Before there are GPUs", {"torch": torch, "encore": encore, "build_model": LanguageModel})
    assert "on each of 64 ranks (FSDP2)" in capsys.readouterr().out
