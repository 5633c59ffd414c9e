"""The promises of the design, on real architectures and in both lowerings: as exact as the lowering says, predicted,
no worse than eager, free where declined."""

from __future__ import annotations

import torch
from torch import nn

import encore
from encore.graph import verify_graph
from encore.schedule import Fused
from support.observed_steps import tiny_step
from support.rounding import FACTOR
from support.workload_cases import FIVE, every_workload, workloads, workloads_lowered

FUSED = [name for name in FIVE if name != "resnet"]
in_each_lowering, fused_workload = workloads_lowered(eager=FIVE, fused=FUSED), workloads(*FUSED)


@every_workload
def test_a_step_equals_eager_bit_for_bit(name: str) -> None:
    verification = tiny_step(name, "eager").verification
    assert verification.bit_equal
    assert verification.largest_difference == 0.0
    assert verification.compared >= 10


@fused_workload
def test_a_fused_step_is_as_close_to_float64_as_eager(name: str) -> None:
    step = tiny_step(name, "fused")
    assert len(step.errors) >= 10
    mine, eager = (sum(errors[side] ** 2 for errors in step.errors.values()) ** 0.5 for side in (0, 1))
    assert mine <= FACTOR * eager + 1e-6
    assert step.verification.compared >= 10


@in_each_lowering
def test_captured_graphs_are_legal(name: str, lowering: str) -> None:
    verify_graph(tiny_step(name, lowering).plan.schedule.graph)


@in_each_lowering
def test_the_prediction_holds_and_is_within_one_percent(name: str, lowering: str) -> None:
    step = tiny_step(name, lowering)
    assert step.measured <= step.report.planned.step_peak <= 1.01 * step.measured


@in_each_lowering
def test_keeping_everything_takes_no_more_than_eager(name: str, lowering: str) -> None:
    step = tiny_step(name, lowering)
    assert step.measured <= step.eager


@fused_workload
def test_a_fused_step_takes_no_more_than_its_operators(name: str) -> None:
    fused, eager = tiny_step(name, "fused"), tiny_step(name, "eager")
    assert fused.report.planned.step_peak <= eager.report.planned.step_peak
    lifted = "recurrent" in fused.report.graphs[0].rewrites  # it starts from other operators, which hold less
    smaller = fused.report.unplanned.step_peak < eager.report.unplanned.step_peak
    assert smaller if lifted else fused.report.unplanned == eager.report.unplanned
    assert any(isinstance(action, Fused) for action in fused.plan.schedule.forward)


@in_each_lowering
def test_an_estimate_equals_the_report_once_workspaces_are_known(name: str, lowering: str) -> None:
    step = tiny_step(name, lowering)
    estimated = step.estimate.report
    if estimated.lowering == lowering or "recurrent" not in estimated.graphs[0].rewrites:
        assert step.estimate.unplanned == step.report.unplanned
    assert step.estimate.resident == step.report.resident
    if estimated.lowering == lowering:
        kept = step.estimate.plan("100%")
        assert kept.planned == step.report.planned
        assert kept.decisions == step.report.decisions


@in_each_lowering
def test_nothing_is_changed_where_nothing_is_asked(name: str, lowering: str) -> None:
    step = tiny_step(name, lowering)
    assert step.plan.name == "keep everything"
    assert step.report.planned.overhead == 0.0
    assert step.report.planned == step.report.unplanned or lowering == "fused"
    assert {row.action for row in step.report.decisions} == {"keep"}


def test_a_model_far_larger_than_this_machine_is_estimated_without_memory() -> None:
    class Summed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    width, layers = 65536, 12
    with torch.device("meta"):
        model = Summed(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        batch = torch.empty(4, width)

    found: list[encore.Estimate] = []
    measured = encore.measure(lambda: found.append(encore.estimate(model, batch)))

    (estimate,) = found
    weights = layers * 4 * width * width
    assert weights > 200e9
    assert estimate.resident == weights + 4 * 4 * width
    assert estimate.unplanned.step_peak >= weights, "gradients are part of the step"
    assert not estimate.fits("200GB")
    assert estimate.fits("1TB")
    assert measured.step_peak < 1_000_000
    assert all(parameter.is_meta for parameter in model.parameters())
