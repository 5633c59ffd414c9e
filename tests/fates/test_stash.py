"""Recurrent layers that the planner lets keep less: predicted to the byte, right, in reports and in saved plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.cost import Workspaces
from encore.fates import Stash
from encore.fates.stash import recurrent
from encore.graph import verify_graph
from encore.schedule import carry_out, replay, schedule_step, simulate
from support.captured_graphs import captured, drop_gradients, train_step

pytestmark = pytest.mark.usefixtures("own_layers")


class Speech(nn.Module):
    def __init__(self, kind: str, library: Any = encore.nn) -> None:
        super().__init__()
        self.layers = getattr(library, kind)(24, 32, num_layers=2)
        self.leave = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.layers(x)
        return self.leave(output).logsumexp(-1).mean()


X = torch.randn(40, 6, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("library", [nn, encore.nn], ids=["torch.nn", "encore.nn"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_planned_stash_is_predicted_to_the_byte_and_right(kind: str, library: Any) -> None:
    model = encore.compile(Speech(kind, library), budget="min", methods="stash")
    train_step(model, X)
    report = encore.report(model)
    drop_gradients(model)
    assert encore.measure(lambda: train_step(model, X)).step_peak == report.planned.step_peak
    assert report.planned.step_peak < 0.7 * report.unplanned.step_peak
    drop_gradients(model)
    encore.verify(model, X)
    rows = [row for row in report.decisions if row.action == "stash"]
    assert len(rows) == (4 if kind == "LSTM" else 2)
    assert all(row.held < row.bytes / 4 and row.code.startswith("every ") for row in rows)
    gates = [row for row in rows if row.shape == (240, 128)]
    assert len(gates) == 2
    assert all(row.held == 0 and row.bytes == 4 * 240 * 128 for row in gates)
    assert "stash every" in str(report)


@pytest.mark.parametrize("every", [1, 7, 16, 40, 100])
def test_every_interval_gives_a_legal_step_with_exact_bytes(every: int) -> None:
    graph = captured(Speech("LSTM"), X).unplanned.schedule.graph
    workspace = Workspaces(run=False)
    first, second = recurrent(graph)
    less = carry_out(graph, [Stash(first.output, every), Stash(second.output, 8)], exact=False)
    verify_graph(less)
    assert [less.values[value].shape for value in first.residue] == [(0, 128), (6 * (-(-40 // every) - 1), 32)]
    assert [graph.values[value].shape for value in first.residue] == [(240, 128), (240, 32)]
    schedule = schedule_step(less)
    peak = max(moment.peak for moment in simulate(schedule, workspace).moments if moment.phase != "end")
    assert replay(schedule, workspace=workspace) == peak


def test_the_eager_lowering_leaves_operators_as_they_are() -> None:
    model = encore.compile(Speech("LSTM"), budget="min", lowering="eager", methods=("stash",))
    train_step(model, X)
    assert {row.action for row in encore.report(model).decisions} == {"keep"}


def test_layers_that_keep_names_stay_as_they_are() -> None:
    model = encore.compile(Speech("GRU"), budget="min", methods=("stash",), keep=["layers"])
    train_step(model, X)
    assert {row.action for row in encore.report(model).decisions} == {"keep"}


def test_a_saved_stash_comes_back_and_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    model = encore.compile(Speech("LSTM"), budget="min", methods="stash")
    train_step(model, X)
    first = encore.report(model)
    first.plan.save(tmp_path / "plan.json")
    assert first.plan.graphs[0].fates["stash"]
    torch._dynamo.reset()
    again = encore.compile(Speech("LSTM"), plan=tmp_path / "plan.json")
    train_step(again, X)
    assert encore.report(again).planned.step_peak == first.planned.step_peak
    right = (tmp_path / "plan.json").read_text()
    (tmp_path / "wrong.json").write_text(right.replace('"every": ', '"every": -'))
    with pytest.raises(encore.PlanError, match=r"graphs\[0\]\.stash\[0\] is damaged: 'every' is -"):
        encore.compile(Speech("LSTM"), plan=tmp_path / "wrong.json")
    (tmp_path / "wrong.json").write_text(right.replace('"every": ', '"every": 9999'))
    torch._dynamo.reset()
    refused = encore.compile(Speech("LSTM"), plan=tmp_path / "wrong.json")
    with pytest.raises(encore.PlanError, match="which it cannot; plan anew"):
        train_step(refused, X)
