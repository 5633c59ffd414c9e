"""`encore.largest_batch`: exact against running, with nothing run to find it."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from encore.cli import main
from encore.errors import BudgetError, OptionError

BUDGET = 500_000


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))


def shapes(size: int) -> Tensor:
    return torch.empty(size, 32, device="meta")


def test_a_step_of_that_size_fits_and_one_more_does_not() -> None:
    built = model()
    optimizer = torch.optim.Adam(built.parameters())
    step = {"budget": BUDGET, "lowering": "eager", "optimizer": optimizer}
    found = encore.largest_batch(built, shapes, **step)  # type: ignore[arg-type]
    assert built(torch.zeros(1, 32)).isfinite().all()
    assert found.size > 1
    assert found.predicted <= BUDGET < found.unplanned
    assert found.overhead > 0
    assert found.size in found.tried
    assert len(found.tried) < 20
    encore.compile(built, **step)
    x = torch.randn(found.size, 32)
    built(x).sum().backward()
    report = encore.report(built)
    assert report.resident + report.planned.step_peak <= found.predicted
    encore.compile(built, **step)
    with pytest.raises(BudgetError):
        built(torch.randn(found.size + 1, 32))


def test_batches_of_several_kinds() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return (self.layers(x) - target).square().mean()

    both: tuple[Any, ...] = (
        lambda size: (shapes(size), shapes(size)),
        lambda size: {"x": shapes(size), "target": shapes(size)},
    )
    sizes = {encore.largest_batch(Loss(), make, budget=BUDGET, lowering="eager").size for make in both}
    assert len(sizes) == 1
    with pytest.raises(OptionError, match="make_batch returned str"):
        encore.largest_batch(Loss(), lambda size: "x", budget=BUDGET)


def test_the_search_ends_at_most() -> None:
    assert encore.largest_batch(model(), shapes, budget="1GiB", most=3, lowering="eager").size == 3


@pytest.mark.parametrize("given", [{"budget": "60%"}, {"budget": "min"}, {"budget": BUDGET, "most": 0}])
def test_what_is_not_accepted(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"is another one for every batch|is not accepted"):
        encore.largest_batch(model(), shapes, **given)


def test_no_batch_fits() -> None:
    with pytest.raises(BudgetError, match="what helps"):
        encore.largest_batch(model(), shapes, budget=20_000, lowering="eager")


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    targets = types.ModuleType("batch_targets")
    targets.small = lambda: (model(), shapes)  # type: ignore[attr-defined]
    targets.wrong = lambda: model()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "batch_targets", targets)
    assert main(["largest", "batch_targets:small", "--budget", str(BUDGET), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["encore_largest"] == 1
    assert found["predicted"] <= BUDGET
    assert main(["largest", "batch_targets:small", "--budget", str(BUDGET)]) == 0
    assert capsys.readouterr().out.startswith(f"largest batch within 488.28 KiB: {found['size']}, predicted")
    assert main(["largest", "batch_targets:small", "--budget", "20KB"]) == 2
    assert main(["largest", "batch_targets:wrong", "--budget", "20KB"]) == 1
    assert "must return (model, make_batch), not Sequential" in capsys.readouterr().err
