"""Plans on paper: what is saved comes back, what belongs to another graph does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import encore


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(torch.tanh(layer(x)))
        return x.square().sum()


X = torch.ones(512, 16)


def planned(lowering: str = "eager") -> encore.Report:
    model = encore.compile(Stack(), budget="min", lowering=lowering)
    model(X).backward()
    return encore.report(model)


@pytest.mark.parametrize("lowering", ["eager", "fused"])
def test_a_saved_plan_is_used_again(tmp_path: Path, lowering: str) -> None:
    first = planned(lowering)
    assert first.plan.graphs[0].fates["recompute"]
    first.plan.save(tmp_path / "plan.json")
    assert encore.SavedPlan.load(tmp_path / "plan.json") == first.plan
    torch._dynamo.reset()
    model = encore.compile(Stack(), plan=tmp_path / "plan.json")
    model(X).backward()
    again = encore.report(model)
    assert again.plan == first.plan
    assert again.planned.step_peak == first.planned.step_peak
    assert again.lowering == lowering
    assert [row.action for row in again.decisions] == [row.action for row in first.decisions]


def test_a_plan_for_another_graph_is_refused_with_the_difference(tmp_path: Path) -> None:
    planned().plan.save(tmp_path / "plan.json")
    torch._dynamo.reset()
    model = encore.compile(Stack(layers=2), plan=tmp_path / "plan.json")
    with pytest.raises(encore.PlanError, match="another graph") as refused:
        model(X).backward()
    assert "\n  - " in str(refused.value) or "\n  -" in str(refused.value)
    assert "aten.tanh" in str(refused.value)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(encore.PlanError, match="no plan can be read"):
        encore.compile(Stack(), plan=path)
    path.write_text("{}")
    with pytest.raises(encore.PlanError, match="does not hold a plan"):
        encore.compile(Stack(), plan=path)
    path.write_text(json.dumps({"encore_plan": 99}))
    with pytest.raises(encore.PlanError, match="layout 99"):
        encore.compile(Stack(), plan=path)
    path.write_text(json.dumps({"encore_plan": 1, "lowering": "eager", "graphs": [{}]}))
    with pytest.raises(encore.PlanError, match="damaged"):
        encore.compile(Stack(), plan=path)


def test_a_plan_brings_its_decisions_and_its_lowering_along() -> None:
    plan = planned().plan
    with pytest.raises(encore.OptionError, match="plan= brings"):
        encore.compile(Stack(), plan=plan, budget="min")
    with pytest.raises(encore.OptionError, match="made for lowering='eager'"):
        encore.compile(Stack(), plan=plan, lowering="fused")
    with pytest.raises(encore.OptionError, match="is not a plan"):
        encore.compile(Stack(), plan=3)
