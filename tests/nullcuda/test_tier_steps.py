"""Compiled steps whose activations go to tiers: every access of every operator is ordered, copies run while the step
computes, and memory is what was predicted."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import encore
from encore.fates import Link
from encore.tiers import Tier
from encore.tiers.streams import SideStreams
from nullcuda.noted_operators import noted_operators
from nullcuda.noted_tiers import NotedTiers, alongside
from nullcuda.null_device import counted, counts, device_with, watched
from nullcuda.steps import allocated_peak

FAST = Link(store=1e-12, load=1e-12, call=0.0, pace=1.0, depth=64)
"""So fast that everything is moved."""
COPY_US, KERNEL_US = 200, 100


class Tower(nn.Module):
    """Equal layers, whose activations are large enough to move."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with mock.patch("encore.compiler.session.link_to", return_value=FAST):
        yield


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    tiers = NotedTiers()
    with tiers.host(depth=64) if request.param == "host" else tiers.disk(tmp_path, workers=1, depth=64) as opened:
        yield opened


def compiled(tier: Tier, layers: int, device: str) -> tuple[nn.Module, torch.Tensor]:
    """A model after its first steps, nearly all of whose activations are moved."""
    x = torch.randn(512, 64, device=device)
    model: nn.Module = encore.compile(
        Tower(layers).to(device), budget="min", methods="encode", lowering="eager", tiers=tier
    )
    with noted_operators():
        for _ in range(2):
            model(x).backward()
    moved = [row for row in encore.report(model).decisions if row.action == "offload"]
    assert len(moved) >= layers - 2
    return model, x


def noted_races(model: nn.Module, x: torch.Tensor, steps: int, side: bool) -> list[str]:
    """The races of some steps, on the default stream or another one, with random delays."""
    stream = torch.Stream(x.device) if side else torch.accelerator.current_stream(x.device)
    delays = device_with(streams=1, random=1, copy_us=COPY_US, kernel_us=KERNEL_US)
    with torch.accelerator.device_index(x.device.index), delays, watched() as seen, stream:
        for _ in range(steps):
            model(x).backward()
            model.zero_grad()
        return seen.races


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("steps", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_steps_have_no_race(tier: Tier, steps: int, side: bool, device: str) -> None:
    model, x = compiled(tier, 5, device)
    before = tier.transfers.stores
    assert noted_races(model, x, steps, side) == []
    assert tier.transfers.stores - before >= 3 * steps


def test_a_step_whose_copies_do_not_wait_for_it_races(tier: Tier) -> None:
    model, x = compiled(tier, 5, "cuda:0")
    with mock.patch.object(SideStreams, "behind", alongside):
        races = noted_races(model, x, 3, side=False)
    assert any(race.startswith("read after write: copy") and "is not behind aten" in race for race in races)


def test_copies_run_next_to_kernels() -> None:
    """By the device's clock: the last step takes hardly longer than its kernels, and much less than kernels and copies
    one after the other."""
    with NotedTiers().host(depth=64) as tier, device_with(kernel_us=100, copy_us=100):
        model, x = compiled(tier, 8, "cuda:0")
        before = counts()
        with watched() as seen:
            model(x).backward()
            after = counts()
            kernels = 100 * (after.launches - before.launches)
            copies = 100 * (after.copies - before.copies)
            assert copies >= 1200
            assert kernels <= seen.microseconds <= kernels + copies / 3


@pytest.mark.parametrize("options", [{"methods": "encode"}, {}], ids=str)
def test_gradients_of_what_was_moved(tier: Tier, options: dict[str, Any]) -> None:
    """Of products of matrices, whose numbers the null device computes if it is asked to."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    x = torch.randn(512, 64)
    grad = torch.randn(512, 64)
    model(x).backward(grad)
    expected = [weight.grad for weight in model.parameters()]
    planned = copy.deepcopy(model).cuda()
    encore.compile(planned, budget="min", lowering="eager", tiers=tier, **options)
    with device_with(products=1, streams=1, random=1, copy_us=COPY_US, kernel_us=KERNEL_US):
        for _ in range(3):
            planned.zero_grad()
            planned(x.cuda()).backward(grad.cuda())
            for weight, wanted in zip(planned.parameters(), expected, strict=True):
                assert weight.grad is not None
                torch.testing.assert_close(weight.grad.cpu(), wanted)
    assert tier.transfers.loads > 0


def test_the_host_waits_for_no_copy() -> None:
    with NotedTiers().host(depth=64) as tier, device_with(streams=1):
        model, x = compiled(tier, 8, "cuda:0")
        assert counted(lambda: model(x).backward()).syncs == 0


def test_memory_is_what_was_predicted(tier: Tier) -> None:
    with device_with(streams=1, random=1, copy_us=COPY_US, kernel_us=KERNEL_US):
        model, x = compiled(tier, 8, "cuda:0")
        model.zero_grad()
        predicted = encore.report(model).planned.step_peak
        reserved = torch.accelerator.memory_reserved()
        for _ in range(3):
            assert allocated_peak(lambda: model(x).backward(), x.device) <= predicted
            model.zero_grad()
        assert torch.accelerator.memory_reserved() == reserved
