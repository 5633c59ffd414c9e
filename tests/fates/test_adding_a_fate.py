"""A sixth kind of fate, the example of docs/planning.md: registered in the table, and known to every stage."""

from __future__ import annotations

import copy
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import encore
from encore.api import compiled_call
from encore.fates import KINDS, Fate
from encore.graph import verify_graph
from encore.plan import Methods
from encore.plan.planner import Planner
from encore.schedule import carry_out, replay, schedule_step, simulate
from support.captured_graphs import captured, drop_gradients, train_step
from support.random_steps import ByBytes, no_workspace

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
X = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> type[Fate]:
    """The class of the page, in the table."""
    (block,) = re.findall(r"## Adding a fate\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("narrow")
    monkeypatch.setitem(sys.modules, "narrow", module)
    exec(compile(block, "narrow.py", "exec", dont_inherit=True), module.__dict__)
    found: type[Fate] = module.__dict__["Narrow"]
    monkeypatch.setitem(KINDS, "narrow", found)
    return found


def test_the_search_chooses_it_and_its_price_is_that_of_the_plan(narrow: type[Fate]) -> None:
    kept = captured(Tower(), X).unplanned
    methods = Methods(frozenset({"recompute", "narrow"}))
    planner = Planner(kept, no_workspace, ByBytes(), methods=methods)
    plans = [one.plan for one in planner.candidate_plans()]
    assert {"narrow", "recompute and narrow"} <= {plan.name for plan in plans}
    (smallest, *_) = sorted((plan for plan in plans if plan.name == "narrow"), key=lambda plan: plan.timeline.step_peak)
    assert smallest.timeline.step_peak < kept.timeline.step_peak
    assert smallest.seconds > planner.kept_seconds
    for fate in smallest.fates:
        decision = smallest.decisions[fate.value]
        assert (decision.fate, decision.held) == (fate, kept.schedule.graph.bytes_of(fate.value) // 2)
        assert decision.seconds > 0


def test_the_schedule_restores_it_for_backward(narrow: type[Fate]) -> None:
    graph = captured(Tower(), X).unplanned.schedule.graph
    fates = [narrow(value) for value in sorted(narrow.allowed_values(graph))]  # type: ignore[call-arg]
    changed = carry_out(graph, fates, exact=True)
    verify_graph(changed)
    schedule = schedule_step(changed)
    gone = {changed.values[fate.value].storage for fate in fates}
    assert not gone.intersection(changed.values[value].storage for value in schedule.saved)
    assert replay(schedule) == max(moment.peak for moment in simulate(schedule).moments if moment.phase != "end")


def test_models_train_with_it_and_reports_and_plan_files_have_it(
    narrow: type[Fate], tmp_path: Path, lowering: str
) -> None:
    plain = Tower()
    model = encore.compile(copy.deepcopy(plain), budget="min", methods="narrow", lowering=lowering)
    train_step(model, X)
    report = encore.report(model)
    rows = [row for row in report.decisions if row.action == "narrow"]
    assert rows
    assert all(row.held == row.bytes // 2 and row.code == "half" and not row.lossless for row in rows)
    assert "narrow half" in str(report)
    for one, other in zip(model.parameters(), _trained(plain).parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-2)
    drop_gradients(model)
    assert encore.measure(lambda: train_step(model, X)).step_peak <= report.planned.step_peak
    replay(compiled_call(model).session.graphs[0].plan.schedule)

    report.plan.save(tmp_path / "plan.json")
    (graph,) = json.loads((tmp_path / "plan.json").read_text())["graphs"]
    assert sorted(entry["value"] for entry in graph["narrow"]) == sorted(row.value for row in rows)
    torch._dynamo.reset()
    again = encore.compile(copy.deepcopy(plain), plan=tmp_path / "plan.json")
    train_step(again, X)
    assert encore.report(again).plan == report.plan
    assert [row.action for row in encore.report(again).decisions] == [row.action for row in report.decisions]


def _trained(model: nn.Module) -> nn.Module:
    train_step(model, X)
    return model


def test_without_the_table_nothing_knows_it() -> None:
    with pytest.raises(encore.OptionError, match="'narrow' is not a method"):
        encore.compile(Tower(), methods="narrow")
