"""Small networks whose backward reads boolean masks, which can be encoded."""

from __future__ import annotations

import torch
from torch import nn


class Gated(nn.Module):
    """Linear layers with a kink that is told by a mask, which a view of it is read through."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(x)
            x = torch.where(hidden > 0, hidden, hidden.exp() - 1)
        return x.square().sum()


class Pictures(nn.Module):
    """Convolutions, ReLU, pooling, a norm and dropout."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.leave = nn.Linear(channels * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        hidden = hidden * (hidden > 0.1)
        hidden = nn.functional.max_pool2d(self.drop(self.second(hidden)).relu(), 2)
        kept = hidden.abs() > 0.05
        return self.leave((hidden * kept).flatten(1)).logsumexp(1).sum()
