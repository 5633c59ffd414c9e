"""Random models for budgets: stacks of blocks of all kinds, of random widths, with batches of their own."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        parts = self.project(x).view(batch, steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return self.out(attended.transpose(1, 2).reshape(batch, steps, width))


class Outputs(nn.Module):
    """The outputs of a recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)[0]
        return found


def rows(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """Linear layers, normalisations and dropout."""
    width = draw.choice([128, 200, 256, 384])
    layers: list[nn.Module] = []
    for _ in range(draw.randint(3, 6)):
        inner = width * draw.randint(1, 4)
        block = nn.Sequential(nn.Linear(width, inner), draw.choice(ACTIVATIONS)(), nn.Linear(inner, width))
        layers += [Residual(block), draw.choice([nn.LayerNorm(width), nn.Dropout(0.1), nn.Identity()])]
    return nn.Sequential(*layers, nn.Linear(width, 10)), (draw.randint(2000, 9000), width)


def images(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """Convolutions with normalisations and pooling."""
    channels, size = draw.choice([8, 12, 16]), draw.choice([32, 40])
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(draw.randint(2, 4)):
        wider = channels * draw.randint(1, 2)
        layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), draw.choice(ACTIVATIONS)()]
        channels = wider
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(channels * (size // 2) ** 2, 10)]
    return nn.Sequential(*layers), (draw.randint(32, 160), 3, size, size)


def sequences(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """Attention or recurrent layers between linear ones."""
    width = draw.choice([64, 128])
    layers: list[nn.Module] = []
    for _ in range(draw.randint(2, 4)):
        mixing = draw.choice([SelfAttention(width, 4), Outputs(nn.LSTM(width, width, batch_first=True))])
        inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        layers += [nn.LayerNorm(width), Residual(mixing), Residual(inner)]
    return nn.Sequential(*layers, nn.Linear(width, 10)), (draw.randint(16, 64), draw.randint(50, 150), width)


FAMILIES: tuple[Callable[[random.Random], tuple[nn.Module, tuple[int, ...]]], ...] = (rows, images, sequences)
OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (torch.optim.AdamW, torch.optim.SGD)


def random_model(seed: int) -> tuple[nn.Module, tuple[int, ...], Callable[..., torch.optim.Optimizer]]:
    """A model, the shape of its batches, and an optimizer."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, shape = FAMILIES[seed % len(FAMILIES)](draw)
    return model, shape, draw.choice(OPTIMIZERS)
