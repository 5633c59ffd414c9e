"""Peaks and workspaces of the device that computes, whichever is current."""

from __future__ import annotations

import torch
from torch import nn

import encore
from encore.cost.allocations import measure_accelerator
from nullcuda.null_device import counted, device_with
from nullcuda.steps import compiled_step

MIB = 1 << 20


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(),
        nn.Linear(16 * 36, 10),
    )  # fmt: skip


def test_a_model_on_the_cpu_is_measured_there() -> None:
    torch.zeros(1, device="cuda")
    model = nn.Linear(256, 256)
    x = torch.randn(64, 256)
    assert encore.measure(lambda: model(x).sum().backward()).step_peak >= 256 * 256 * 4


def test_the_device_with_the_highest_peak_is_measured() -> None:
    torch.zeros(1, device="cuda")
    found = encore.measure(lambda: [torch.empty(MIB, device="cuda:1"), torch.empty(MIB)])
    assert (found.step_peak, found.left) == (4 * MIB, 4 * MIB)
    assert encore.measure(lambda: torch.empty(MIB, device="cuda")).step_peak == 4 * MIB


def test_one_device_is_measured() -> None:
    found = measure_accelerator(lambda: torch.empty(MIB, device="cuda:1"), "cuda:1")
    assert found.step_peak == 4 * MIB
    assert measure_accelerator(lambda: torch.empty(MIB, device="cuda:1"), "cuda:0").step_peak == 0


def test_a_model_on_another_device_than_the_current_one() -> None:
    steps = [
        compiled_step(network().to(device), [torch.randn(8, 3, 8, 8, device=device)], overhead=0)
        for device in ("cuda:0", "cuda:1")
    ]
    assert steps[0].predicted == steps[1].predicted
    assert steps[0].measured == steps[1].measured
    assert steps[1].measured <= steps[1].predicted <= 1.01 * steps[1].measured


def test_draws_are_repeated_from_the_generator_of_their_device() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(), nn.Linear(256, 64), nn.Dropout()).to("cuda:1")
    before = torch.cuda.get_rng_state(0)
    step = compiled_step(model, [torch.randn(512, 64, device="cuda:1")], budget="min")
    assert step.measured <= step.predicted
    assert torch.equal(torch.cuda.get_rng_state(0), before)


def test_a_graph_on_two_devices_says_what_its_budget_bounds() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64, device="cuda:0"), nn.Linear(64, 64, device="cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).to("cuda:1")).sum()

    step = compiled_step(Split(), [torch.randn(8, 64, device="cuda:0")], overhead=0)
    assert any("a budget is one of each device" in note for note in step.report.graphs[0].notes)


def test_no_step_waits_for_the_device() -> None:
    with device_with(streams=1):
        step = compiled_step(network().cuda(), [torch.randn(8, 3, 8, 8, device="cuda")], budget="min")
    assert step.counts.syncs == 0
    assert counted(lambda: None).syncs == 0
