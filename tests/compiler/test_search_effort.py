"""What a first step searches: no form of a graph that cannot win. No budget is rejected because of measured times."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.compiler import forms
from encore.cost import Seconds
from encore.graph import Graph
from encore.options import Budget, Options
from encore.plan import Candidate, Planner, may_win
from encore.rewrite import Judge, rewrite
from support.captured_graphs import Perceptron, captured


def layers() -> tuple[nn.Module, torch.Tensor]:
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(6))
    return nn.Sequential(*blocks), torch.randn(1024, 64)


def first_step(budget: int | str, **options: Any) -> int:
    """The peak of a planned step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = layers()
    encore.compile(model, budget=budget, **options)
    model(x).sum().backward()
    report = encore.report(model)
    return report.resident + report.planned.step_peak


class Searches:
    """Counts rewrites and searches of a graph."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rewrites = self.searches = 0
        candidate_plans = Planner.candidate_plans

        def rewriting(*args: Any, **options: Any) -> Any:
            self.rewrites += 1
            return rewrite(*args, **options)

        def searching(planner: Planner) -> list[Candidate]:
            self.searches += 1
            return candidate_plans(planner)

        patch.setattr(forms, "rewrite", rewriting)
        patch.setattr(Planner, "candidate_plans", searching)


@pytest.mark.parametrize("budget", ["min", "60%"])
def test_a_graph_without_rewrites_for_speed_is_rewritten_and_searched_once(
    budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for verdict in ("transposed_pays", "stacking_pays", "stacking_gradients_pays", "merging_pays"):
        monkeypatch.setattr(Judge, verdict, lambda *_: False)
    counted = Searches(monkeypatch)
    first_step(budget, lowering="fused", skip=("fuse",))
    assert (counted.rewrites, counted.searches) == (1, 1)


@pytest.mark.parametrize(("overhead", "searches"), [(0.01, 1), (0.5, 2)])
def test_a_form_that_is_slower_than_allowed_is_not_searched(
    overhead: float, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that is used in a loop is transposed once, which takes half the time here."""

    class Loop(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(16):
                x = torch.tanh(super().forward(x))
            return x.sum()

    counted = Searches(monkeypatch)
    seconds = Planner.kept_seconds.func  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Planner, "kept_seconds", property(lambda form: seconds(form) * (1.0 if form.reference is form else 1.2))
    )
    captured(Loop(32, 32), torch.randn(16, 32), lowering="fused", overhead=overhead, skip=("fuse",))
    assert counted.rewrites == 2
    assert counted.searches == searches


def test_further_candidates_win_only_if_they_are_faster_or_within_the_budget() -> None:
    torch._dynamo.reset()
    kept = captured(Perceptron(), torch.randn(3, 4)).plan
    peak, resident = kept.timeline.step_peak, kept.timeline.resident
    found = [Candidate.of(kept), Candidate(peak // 2, 0.1, lambda: kept)]

    def asked(fastest: float, **options: Any) -> bool:
        return may_win(fastest, found, Options(**options), unplanned=kept)

    assert asked(0.05, overhead=0.05)
    assert not asked(0.06, overhead=0.05)
    assert asked(9.0, budget=Budget())
    within = Budget(bytes=resident + int(0.6 * peak))
    assert asked(0.09, budget=within)
    assert not asked(0.1, budget=within)
    assert asked(9.0, budget=Budget(bytes=resident + int(0.4 * peak)))


@pytest.mark.parametrize("lowering", ["eager", "fused"])
def test_a_budget_that_can_be_met_is_met_whatever_was_measured(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search follows seconds. With those of another day it ends elsewhere, and never rejects what it found then."""
    floor = first_step("min", lowering=lowering, skip=("fuse",))
    seconds = Seconds.__call__
    for day in (3, 5):

        def busy(self: Seconds, graph: Graph, op: Any, over: int | None = None, day: int = day) -> float:
            facts = f"{day}{op.target}{[graph.values[value].shape for value in op.reads]}"
            return seconds(self, graph, op, over) * 10 ** (hashlib.sha256(facts.encode()).digest()[0] / 256 * 6 - 3)

        monkeypatch.setattr(Seconds, "__call__", busy)
        assert first_step(floor, lowering=lowering, skip=("fuse",)) <= floor
