"""The report of a plan that recomputes, predicted without a step."""

from __future__ import annotations

import functools

import torch
from torch import nn

import encore


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 64)
        self.outer = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.outer(nn.functional.gelu(torch.sigmoid(self.inner(x)))))


class Tower(nn.Module):
    """Equal layers; one is called by a name that would be markup if nobody escaped it."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
        self.add_module("<b>bold</b>", nn.Sequential(nn.Linear(32, 32), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, "<b>bold</b>")(self.layers(x)).square().sum()


@functools.cache
def tower_estimate() -> encore.Estimate:
    """Of four layers of 512 rows."""
    return encore.estimate(Tower(), torch.randn(512, 32))


@functools.cache
def tower_plan() -> encore.Report:
    """The plan of a budget half-way between the floor and keeping everything."""
    estimate = tower_estimate()
    return estimate.plan((estimate.floor + estimate.pareto[0][0]) // 2)
