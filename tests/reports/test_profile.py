"""Memory over a step, and everything it allocates, as plain numbers: they add up to the prediction, to the byte."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import encore
from encore.api import compiled_call
from encore.compiler.profiles import thinned
from encore.reports.allocations import Allocation, alive_at_peak
from encore.reports.profile import LAYERS, Profile
from encore.schedule import Kind
from support.captured_graphs import train_step
from support.example_report import tower_plan


@pytest.fixture
def planned() -> encore.Report:
    return tower_plan()


def highest(allocations: Sequence[Allocation]) -> int:
    """The most that is alive at once."""
    events = [(item.born, item.bytes) for item in allocations]
    events += [(item.died, -item.bytes) for item in allocations if item.died is not None]
    assert len({event for event, _ in events}) == len(events), "two things happen at once"
    held = most = 0
    for _, size in sorted(events):
        held += size
        most = max(most, held)
    return most


def assert_adds_up(report: encore.Report) -> None:
    for prediction in (report.unplanned, report.planned):
        profile = prediction.profile
        assert max(profile.totals) == report.resident + prediction.step_peak
        assert profile.totals[profile.peak] == max(profile.totals)
        assert all(min(column) >= 0 for column in profile.bytes.values())
        assert list(profile.at) == sorted(set(profile.at))
        assert 0 < profile.backward < profile.moments
    assert highest(report.allocations) == report.resident + report.planned.step_peak - report.beside


def test_the_profile_of_a_plan_adds_up(planned: encore.Report) -> None:
    assert_adds_up(planned)
    assert planned.pareto
    assert not any(planned.unplanned.profile.bytes["recomputed"])
    assert max(planned.planned.profile.bytes["recomputed"]) >= max(
        row.bytes for row in planned.decisions if row.action == "recompute"
    )


def test_layers_hold_every_kind_once() -> None:
    kinds = [kind for kinds in LAYERS.values() for kind in kinds]
    assert sorted(kinds, key=str) == sorted(Kind, key=str)


def test_moments_are_told_in_words(planned: encore.Report) -> None:
    what = set(planned.planned.profile.what)
    assert {"forward is done", "backward is done"} <= what
    assert any(words.startswith("forward: addmm, layers.0.inner (example_report.py:") for words in what)
    assert any(words.startswith("backward: release ") for words in what)


def test_what_lives_beside_the_step_is_a_layer() -> None:
    model = encore.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lowering="eager", resident=1000)
    train_step(model, torch.randn(8, 4))
    report = encore.report(model)
    assert report.beside == 1000
    assert set(report.planned.profile.bytes["beside the step"]) == {1000}
    assert_adds_up(report)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(torch.relu(self.enter(x)))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.leave(x)).sum()


def test_several_graphs_stand_on_each_other() -> None:
    model = encore.compile(Halves(), lowering="eager")
    x = torch.randn(32, 16, requires_grad=True)
    model(x).backward()
    report = encore.report(model)
    assert len(report.graphs) == 2
    assert_adds_up(report)
    assert report.pareto == ((report.resident + report.planned.step_peak, report.planned.overhead),)


class WithNothing(nn.Module):
    """Some of its tensors have no bytes, and one of those is written over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.cat([self.inner(x), torch.tanh(torch.sigmoid(self.inner(x[:0])))])).sum()


def test_tensors_without_bytes_are_not_there() -> None:
    model = encore.compile(WithNothing(), lowering="eager")
    model(torch.randn(8, 4)).backward()
    report = encore.report(model)
    assert_adds_up(report)
    assert all(item.bytes > 0 for item in report.allocations)


@pytest.mark.parametrize(("moments", "stretches"), [(10, 5), (11, 5), (1000, 7), (5000, 500)])
def test_thinning_keeps_the_ends_of_every_stretch(moments: int, stretches: int) -> None:
    draw = random.Random(moments)
    heights = [draw.randrange(1000) for _ in range(moments)]
    kept = thinned(heights, stretches)
    assert kept == sorted(set(kept))
    assert len(kept) <= 2 * stretches
    assert max(heights[place] for place in kept) == max(heights)
    assert min(heights[place] for place in kept) == min(heights)
    if moments <= 2 * stretches:
        assert kept == list(range(moments))
    gaps = [later - earlier for earlier, later in itertools.pairwise(kept)]
    assert max(gaps) <= 2 * -(-moments // stretches)


# -- allocations -------------------------------------------------------------------------------------------------------


def test_what_is_alive_at_the_peak_is_the_peak(planned: encore.Report) -> None:
    alive = alive_at_peak(planned.allocations)
    assert sum(item.bytes for item in alive) == planned.resident + planned.planned.step_peak
    by_kind = {kind: sum(item.bytes for item in alive if item.kind == kind) for kind in planned.planned.at_peak}
    assert by_kind == planned.planned.at_peak
    assert [item.bytes for item in alive] == sorted((item.bytes for item in alive), reverse=True)


def test_gradients_and_what_was_there_outlive_the_step(planned: encore.Report) -> None:
    left = [item for item in planned.allocations if item.died is None]
    parameters = sum(item.bytes for item in left if item.kind == "parameter")
    assert parameters + sum(item.bytes for item in left if item.kind == "input") == planned.resident
    assert sum(item.bytes for item in left if item.kind == "gradient") >= parameters
    assert {item.kind for item in left} <= {"parameter", "input", "gradient", "output"}


def test_recomputed_values_are_short_lived(planned: encore.Report) -> None:
    again = [item for item in planned.allocations if item.kind == "recomputed"]
    assert again
    assert all(item.died is not None for item in again)
    assert all(item.module.startswith("layers.") and item.source.startswith("example_report.py:") for item in again)


def test_a_report_holds_on_to_no_graph_and_no_tensor() -> None:
    model = encore.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lowering="eager")
    x = torch.randn(8, 4)
    train_step(model, x)
    captured = compiled_call(model).session.last_step[0]
    held = [weakref.ref(thing) for thing in (model, model[0].weight, x, captured.plan.schedule.graph)]
    report = encore.report(model)
    del model, x, captured
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)
    assert isinstance(report.planned.profile, Profile)
    assert report.plan.graphs[0].operators
