"""The suite `spine`: interleaved rounds, ratios, differences, and one tiny workload from end to end."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from benchmarks.differences import gradient_difference
from benchmarks.pairs import PairedTimes, paired_times
from benchmarks.spine import STAGES, compare_workload
from benchmarks.workloads import build

SMALL = {"batch_size": 2, "hidden": 8, "layers": 1, "heads": 2, "steps": 6}


def test_rounds_are_interleaved() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    times = paired_times(lambda: side("eager", 1.0), lambda: side("encore", 3.0), rounds=3)
    assert order == ["eager", "encore", "encore", "eager", "eager", "encore"]
    assert times == PairedTimes(((1.0, 3.0),) * 3)


def test_ratios() -> None:
    times = PairedTimes(((1.0, 2.0), (2.0, 2.0), (4.0, 6.0)))
    assert times.ratio == 1.5
    assert times.spread == (1.0, 2.0)
    assert times.seconds == (2.0, 2.0)


def test_difference_of_gradients() -> None:
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    assert gradient_difference(one, other) == 0.0
    for model, weight in ((one, 1.0), (other, 1.25)):
        model.weight.grad = torch.full((1, 2), weight)
        model.bias.grad = torch.zeros(1)
    assert gradient_difference(one, other) == 0.25
    other.bias.grad = None
    assert gradient_difference(one, other) == float("inf")


def test_one_workload() -> None:
    told: list[str] = []
    found = compare_workload(functools.partial(build, "transformer", **SMALL), rounds=3, advance=told.append)
    assert len(told) == STAGES
    assert (found.workload, found.graphs, found.plain, found.rounds) == ("transformer", 1, (), 3)
    assert found.gradient_difference == 0.0
    assert found.encore_peak <= found.predicted_peak
    assert found.prediction_error == pytest.approx(found.predicted_peak / found.encore_peak - 1)
    assert found.lowest_ratio <= found.ratio <= found.highest_ratio
    assert 0 < found.simulator_seconds < found.first_step_seconds
    assert found.capture_seconds + found.plan_seconds < found.first_step_seconds
    assert found.operators > 50
