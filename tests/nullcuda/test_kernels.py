"""Fused kernels on CUDA: Inductor's Triton kernels are taken, and are fewer launches than eager's."""

from __future__ import annotations

import torch
from torch import nn

from nullcuda.null_device import counted
from nullcuda.steps import Scored, compiled_step


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Tanh()).cuda()


def test_kernels_are_compiled_and_launched() -> None:
    x = torch.randn(512, 64, device="cuda")
    eager = Scored(network())
    for _ in range(2):
        eager(x).backward()
        eager.zero_grad()
    plain = counted(lambda: eager(x).backward())
    step = compiled_step(network(), [x], overhead=0)
    assert step.counts.triton_launches > 0
    assert step.counts.launches + step.counts.triton_launches <= 1.1 * plain.launches
    assert step.measured <= step.predicted
    assert step.report.graphs[0].kernels > 0
