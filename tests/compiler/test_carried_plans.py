"""Batches of many lengths: plans, judgements and measurements are carried over, and every promise is kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import encore
import encore.cost.seconds
import encore.cost.workspace
import encore.rewrite.judge
from encore.api import compiled_call
from encore.measurements import MachineCache
from encore.plan import Planner
from support.compare_with_eager import assert_same, run_step

WORDS, CLASSES, ROWS = 60, 12, 8
LENGTHS = (24, 48, 32, 40, 20, 44, 28, 52)


class Tagger(nn.Module):
    """A class for every word of a sentence."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.words = nn.Embedding(WORDS, 16)
        layers = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16)) for _ in range(4))
        self.layers = nn.ModuleList(layers)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for number, layer in enumerate(self.layers):
            h = h + layer(h)
            if self.breaks and number == 1:
                torch._dynamo.graph_break()
        return F.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


class Unrolled(nn.Module):
    """The same with a cell that is unrolled over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(WORDS, 16), nn.LSTMCell(16, 24)
        self.out = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, c = (torch.zeros(len(x), 24) for _ in range(2))
        states = []
        for step in self.words(x).unbind(1):
            h, c = self.cell(step, (h, c))
            states.append(torch.tanh(self.out(h)))
        return F.cross_entropy(torch.stack(states, 1).flatten(0, 1), y.flatten())


def batch(length: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (rows, length)), torch.randint(CLASSES, (rows, length))


def train(model: nn.Module, length: int) -> encore.Report:
    """A step, and the report of it."""
    step(model, batch(length))
    return encore.report(model)


def step(model: nn.Module, args: tuple[Tensor, Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    model(*args).backward()


def measured_peak(model: nn.Module, length: int) -> int:
    """The peak of another step of this length."""
    args = batch(length)
    model.zero_grad(set_to_none=True)
    return encore.measure(lambda: step(model, args)).step_peak


def total(report: encore.Report) -> int:
    return report.resident + report.planned.step_peak


class Work:
    """Counts what carried plans spare."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        for owner, name in (
            (Planner, "_searches"),
            (encore.cost.seconds, "op_seconds"),
            (encore.cost.workspace, "probe_workspace"),
            (encore.rewrite.judge, "_ratio"),
        ):
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.done.append(name)
            return function(*args, **options)

        return counted


LOWERINGS = [{"lowering": "eager"}, {"lowering": "fused", "skip": ("fuse",)}]
"""The second has the passes of the fused lowering, and no kernels to compile."""


@pytest.mark.parametrize(("options", "lengths"), [(LOWERINGS[0], LENGTHS), (LOWERINGS[1], LENGTHS[:3])])
def test_a_budget_is_kept_for_every_length(options: dict[str, Any], lengths: Sequence[int]) -> None:
    model = encore.compile(Tagger(), budget="60%", **options)
    largest = 0
    for length in lengths:
        report = train(model, length)
        largest = max(largest, report.resident + report.unplanned.step_peak)
        assert total(report) <= 0.6 * largest
        measured = measured_peak(model, length)
        assert measured <= report.planned.step_peak <= 1.01 * measured


def test_gradients_of_carried_plans_are_those_of_eager() -> None:
    twin = Tagger()
    model = encore.compile(copy.deepcopy(twin), budget="50%", lowering="eager")
    for length in (24, 40, 32):
        args = batch(length)
        assert_same(run_step(model, args), run_step(twin, args), "eager")


@pytest.mark.parametrize(
    "options", [LOWERINGS[0], pytest.param(LOWERINGS[1], marks=pytest.mark.slow), {}], ids=["eager", "fused", "kernels"]
)
def test_nothing_is_searched_or_measured_for_the_fourth_length(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encore.compile(Tagger(), budget="50%", **options)
    work = Work(monkeypatch)
    for length in LENGTHS[:3]:
        train(model, length)
    assert "_searches" in work.done
    work.done.clear()
    report = train(model, LENGTHS[3])
    assert not work.done
    assert report.planned.step_peak < report.unplanned.step_peak


def test_a_step_that_was_to_be_measured_is_probed_if_it_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The profiler that would measure it forbids to probe workspaces."""
    cache = MachineCache(tmp_path / "measurements.json", "here")
    monkeypatch.setattr(encore.cost.workspace, "machine_cache", lambda: cache)
    model = encore.compile(Tagger(), budget="60%", lowering="eager")
    train(model, 24)
    work = Work(monkeypatch)
    report = train(model, 32)
    assert "probe_workspace" in work.done
    assert not any("profiler" in note for graph in report.graphs for note in graph.notes)


@pytest.mark.measured_times
def test_nothing_is_timed_for_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encore.compile(Tagger(), budget="50%")
    train(model, 192)
    work = Work(monkeypatch)
    train(model, 160)
    assert not {"op_seconds", "_ratio", "_searches"}.intersection(work.done)


def test_a_loop_of_another_length_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encore.compile(Unrolled(), budget="80%", lowering="eager")
    train(model, 10)
    work = Work(monkeypatch)
    for length in (8, 9):
        report = train(model, length)
        assert report.budget is not None
        assert total(report) <= report.budget
        measured = measured_peak(model, length)
        assert measured <= report.planned.step_peak <= 1.01 * measured
    assert "_searches" not in work.done


def test_plans_that_do_not_fit_lead_to_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encore.compile(Tagger(), budget="50%", lowering="eager")
    train(model, 24)
    work = Work(monkeypatch)
    monkeypatch.setattr(Planner, "carried_plans", lambda planner, patterns: [planner.as_it_is()])
    report = train(model, 32)
    assert work.done.count("_searches") == 1
    assert report.budget is not None
    assert total(report) <= report.budget


def test_no_budget_is_rejected_before_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encore.compile(Tagger(), budget=total(train(encore.compile(Tagger(), budget="60%"), 32)), lowering="eager")
    train(model, 32)
    work = Work(monkeypatch)
    with pytest.raises(encore.BudgetError):
        train(model, 120)
    assert "_searches" in work.done


def test_sizes_out_of_range_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encore.compile(Tagger(), overhead=0.2, lowering="eager")
    train(model, 8)
    work = Work(monkeypatch)
    train(model, 30)
    assert "_searches" not in work.done
    train(model, 40)
    assert "_searches" in work.done


def test_calls_of_a_step_take_carried_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Tagger(breaks=True)
    model = encore.compile(copy.deepcopy(twin), budget="70%", lowering="eager")
    train(model, 24)
    work = Work(monkeypatch)
    args = batch(32)
    assert_same(run_step(model, args), run_step(twin, args), "eager")
    report = encore.report(model)
    assert "_searches" not in work.done
    assert report.budget is not None
    assert total(report) <= report.budget
    monkeypatch.setattr(Planner, "carried_plans", lambda planner, patterns: [planner.as_it_is()])
    model.zero_grad(set_to_none=True)
    report = train(model, 48)
    assert "_searches" in work.done
    assert report.budget is not None
    assert total(report) <= report.budget


def test_few_structures_are_remembered() -> None:
    model = encore.compile(Tagger(), budget="60%", lowering="eager")
    for length in LENGTHS[:3]:
        train(model, length)
    structures = compiled_call(model).session.structures
    assert len(structures._known) == 1
