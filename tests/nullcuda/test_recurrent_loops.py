"""`encore.nn`'s recurrent layers on CUDA: one launch for the time loop of a layer and direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from nullcuda.null_device import counted
from nullcuda.steps import as_loss, compiled_step

KINDS = ("LSTM", "GRU", "RNN")


def launches(module: nn.Module, steps: int, batch: int = 8, resets: bool = False) -> int:
    """Kernels of Triton that a step of a layer launches."""
    x = torch.randn(steps, batch, 32, device="cuda")
    given: tuple[Any, ...] = (x,)
    if resets:
        given = x, None, torch.zeros(steps, batch, dtype=torch.bool, device="cuda")

    def step() -> None:
        as_loss(module(*given)).backward()

    step()
    return counted(step).triton_launches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [64, 640])
def test_launches_do_not_depend_on_the_length(kind: str, hidden: int) -> None:
    """A loop forward, a loop backward and the biases; 640 units of an LSTM or a GRU are shared by programs."""
    module = getattr(encore.nn, kind)(32, hidden, bidirectional=True).cuda()
    assert launches(module, 10) == launches(module, 50) == 6
    assert launches(module, 50, resets=True) == 6


def test_layers_that_project_run_step_by_step() -> None:
    module = encore.nn.LSTM(32, 64, proj_size=16).cuda()
    assert launches(module, 20) - launches(module, 10) == 10 * 3  # a cell forward, and two kernels backward


@pytest.mark.parametrize("stash", ["fast", 8])
@pytest.mark.parametrize("kind", KINDS)
def test_host_work_does_not_grow_with_the_length(kind: str, stash: str | int) -> None:
    """All launches of a step with 80 time steps, products included, are fewer than the time steps."""
    module = getattr(encore.nn, kind)(32, 64, stash=stash).cuda()
    x = torch.randn(80, 8, 32, device="cuda")

    def step() -> None:
        as_loss(module(x)).backward()

    step()
    found = counted(step)
    assert found.launches + found.triton_launches < (40 if stash == "fast" or kind != "LSTM" else 260)
    assert found.syncs == 0


class Agent(nn.Module):
    def __init__(self, kind: str, hidden: int, stash: str) -> None:
        super().__init__()
        self.layers = getattr(encore.nn, kind)(32, hidden, num_layers=2, stash=stash)
        self.head = nn.Linear(hidden, 4)

    def forward(self, x: Tensor, resets: Tensor) -> Tensor:
        return self.head(self.layers(x, None, resets)[0]).square().mean()


@pytest.mark.parametrize("stash", ["fast", "lean"])
@pytest.mark.parametrize(("kind", "hidden"), [("LSTM", 64), ("LSTM", 640), ("GRU", 64), ("RNN", 64)])
def test_compiled_steps_keep_their_prediction(kind: str, hidden: int, stash: str) -> None:
    x, resets = torch.randn(60, 16, 32, device="cuda"), torch.zeros(60, 16, dtype=torch.bool, device="cuda")
    step = compiled_step(Agent(kind, hidden, stash).cuda(), [x, resets], overhead=0)
    larger = 1 << 20 if hidden == 640 else 0  # the allocator may return blocks larger by so much, which count whole
    assert step.measured <= step.predicted + larger
    assert step.predicted <= 1.01 * step.measured
    assert step.counts.syncs == 0


def test_a_layer_that_runs_step_by_step_is_noted() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = encore.nn.LSTM(32, 64, proj_size=16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)[0].sum()

    x = torch.randn(10, 8, 32, device="cuda")
    step = compiled_step(Projected().cuda(), [x], overhead=0)
    assert any("step by step" in note and "projects" in note for note in step.report.graphs[0].notes)
    step = compiled_step(Agent("GRU", 64, "fast").cuda(), [x, torch.zeros(10, 8, dtype=torch.bool, device="cuda")])
    assert not any("step by step" in note for note in step.report.graphs[0].notes)
