"""The search against every choice there is on small graphs, and on a deep network budget by budget."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import encore
from encore.plan.plan import Plan, keep_everything
from encore.plan.planner import Planner
from encore.plan.search import Search
from encore.plan.step_model import RoughPlan, StepModel
from encore.plan.strategies import STRATEGIES
from encore.schedule import simulate
from support.captured_graphs import captured
from support.observed_steps import tiny_step
from support.random_steps import ByBytes, kept_step, no_workspace

MOST_CHOICES = 11


def sketched(kept: Plan) -> StepModel:
    return StepModel(kept.schedule, kept.timeline, ByBytes(), fused=False)


def every_choice(model: StepModel) -> list[RoughPlan]:
    values = sorted(model.droppable - model.melting)
    chosen = itertools.chain.from_iterable(itertools.combinations(values, size) for size in range(len(values) + 1))
    return [model.evaluate(choice) for choice in chosen]


@pytest.mark.slow
def test_on_small_graphs_plans_are_as_fast_as_the_fastest_of_all_choices() -> None:
    looked_at, good = 0, 0
    for seed in range(40):
        kept = kept_step(seed)
        model = sketched(kept)
        if not 2 <= len(model.droppable - model.melting) <= MOST_CHOICES:
            continue
        planner = Planner(kept, no_workspace, ByBytes())
        choices = every_choice(model)
        found = Search(model).run(model.numbers(strategy(model.graph)) for strategy in STRATEGIES.values())
        floor, most = min(choice.peak for choice in choices), kept.timeline.step_peak
        for budget in {floor, (2 * floor + most) // 3, (floor + 2 * most) // 3}:
            looked_at += 1
            best = min(choice.seconds for choice in choices if choice.peak <= budget)
            mine = min((one.seconds for one in found if one.peak <= budget), default=float("inf"))
            good += planner.kept_seconds + mine <= 1.05 * (planner.kept_seconds + best)
    assert looked_at >= 30
    assert good >= 0.9 * looked_at


@pytest.mark.parametrize("seed", range(8))
def test_an_outline_is_close_to_what_the_built_plan_holds(seed: int) -> None:
    kept = kept_step(seed)
    planner = Planner(kept, no_workspace, ByBytes())
    for candidate in planner.candidate_plans():
        assert candidate.plan.timeline.step_peak == pytest.approx(candidate.step_peak, rel=0.35)


@pytest.mark.slow
def test_blocks_in_outline_are_close_to_the_built_plan() -> None:
    """Backward reads most feature maps of attention through views of its own: those must be seen through."""
    kept = tiny_step("transformer", "eager").plan
    planner = Planner(kept, no_workspace, ByBytes())
    model = StepModel(kept.schedule, simulate(kept.schedule), ByBytes(), fused=False)
    rough = model.evaluate(STRATEGIES["blocks"](model.graph))
    built = planner.plan(rough.fates).timeline.step_peak
    assert built == pytest.approx(rough.peak, rel=0.15)
    assert built < 0.65 * kept.timeline.step_peak


def test_a_copy_that_a_result_is_written_over_takes_no_memory_in_outline() -> None:
    """ReLU of a convolution, both made again: as forward did, backward gives one's memory to the other."""
    torch._dynamo.reset()
    layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    found = captured(nn.Sequential(layers, nn.Flatten(), nn.Linear(4096, 4)), torch.randn(8, 3, 16, 16), overhead=1e-9)
    kept = keep_everything(found.plan.schedule.graph, no_workspace)
    model = sketched(kept)
    made = [op for op in model.graph.ops if op.forward and op.module.endswith(("0.0", "0.1"))]
    rough = model.evaluate(model.numbers(value for op in made for value in op.writes if value is not None))
    assert rough.recomputed
    assert rough.peak == Planner(kept, no_workspace, ByBytes()).plan(rough.fates).timeline.step_peak


def test_the_kept_step_in_outline_is_the_kept_step() -> None:
    plan = tiny_step("transformer", "eager").plan
    model = StepModel(plan.schedule, plan.timeline, ByBytes(), fused=False)
    assert model.evaluate(()).peak == plan.timeline.step_peak
    assert model.evaluate(()).seconds == 0


class Deep(nn.Module):
    """Sixteen pre-norm layers, as in a sweep in which PyTorch's own partitioner went up where it should go down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_a_sweep_over_budgets_of_a_deep_network_is_monotone() -> None:
    estimate = encore.estimate(Deep(), torch.randn(256, 16))
    totals, overheads = zip(*estimate.pareto, strict=True)
    assert list(totals) == sorted(totals, reverse=True)
    assert list(overheads) == sorted(overheads)
    assert len(totals) >= 5
    unplanned = estimate.resident + estimate.unplanned.step_peak
    assert totals[-1] < 0.5 * unplanned
    peaks = []
    for share in (0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        planned = estimate.plan(int(share * unplanned))
        assert planned.resident + planned.planned.step_peak <= share * unplanned
        peaks.append((planned.planned.step_peak, -planned.planned.overhead))
    assert peaks == sorted(peaks)


def test_the_kept_plan_is_fused_once() -> None:
    fused: list[Plan] = []

    def fuse(plan: Plan) -> Plan:
        fused.append(plan)
        return plan

    planner = Planner(kept_step(0), no_workspace, ByBytes(), fuse=fuse)
    kept = planner.candidate_plans()[0]
    assert kept.plan.schedule is planner.runs.schedule
    assert fused == [planner.kept]
