"""Pictures with a class each: noisy stripes, and shapes filled with textures."""

import math
from collections.abc import Callable

import torch

from encore.errors import OptionError

Field = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the two coordinates of each pixel to whether it belongs; a shape lies within one of the origin."""


def _square(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.maximum(u.abs(), v.abs())


SHAPES: dict[str, Field] = {
    "disc": lambda u, v: u.hypot(v) < 1,
    "square": lambda u, v: _square(u, v) < 0.85,
    "cross": lambda u, v: (_square(u, v) < 1) & (torch.minimum(u.abs(), v.abs()) < 0.3),
    "ring": lambda u, v: (u.hypot(v) < 1) & (u.hypot(v) > 0.6),
    "triangle": lambda u, v: (v < 0.6) & (v > 1.9 * u.abs() - 1),
    "sickle": lambda u, v: (u.hypot(v) < 1) & ((u - 0.5).hypot(v) > 0.8),
    "frame": lambda u, v: (_square(u, v) < 0.9) & (_square(u, v) > 0.5),
    "bow": lambda u, v: (u.abs() < 1) & (v.abs() < 0.9 * u.abs()),
}
TEXTURES: dict[str, Field] = {
    "plain": lambda u, v: torch.ones_like(u),
    "striped": lambda u, v: torch.sin(9 * v) > 0,
    "chequered": lambda u, v: torch.sin(7 * u) * torch.sin(7 * v) > 0,
    "dotted": lambda u, v: torch.sin(8 * u) * torch.sin(8 * v) > 0.4,
    "ringed": lambda u, v: torch.sin(12 * u.hypot(v)) > 0,
}
COMBINATIONS = len(SHAPES) * len(TEXTURES)
"""Lengths without a common divisor: class k has shape k mod 8 and texture k mod 5, and the first forty all differ."""
HUES = 25
MOST_CLASSES = COMBINATIONS * HUES


def class_name(label: int) -> str:
    """What a picture of this class shows; from the 41st on, the same in another hue."""
    hue = f", hue {label // COMBINATIONS}" if label >= COMBINATIONS else ""
    return f"{list(TEXTURES)[label % len(TEXTURES)]} {list(SHAPES)[label % len(SHAPES)]}{hue}"


def shapes(labels: torch.Tensor, classes: int, resolution: int, generator: torch.Generator) -> torch.Tensor:
    """A textured shape a picture `[picture, 3, resolution, resolution]`, anywhere, of any size and colour, and noise.

    Only where there are more classes than shapes and textures make is a class also told by its hue.
    """
    if not 1 <= classes <= MOST_CLASSES:
        raise OptionError(f"classes={classes} is out of range: 1 to {MOST_CLASSES}")

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(len(labels), 1, 1, generator=generator)

    y, x = torch.meshgrid(*[torch.linspace(-1, 1, resolution)] * 2, indexing="ij")
    size, tilt = uniform(0.55, 0.8), uniform(-0.3, 0.3)
    x, y = (x - uniform(-0.2, 0.2)) / size, (y - uniform(-0.2, 0.2)) / size
    u, v = x * tilt.cos() + y * tilt.sin(), y * tilt.cos() - x * tilt.sin()
    inside, lit = torch.empty_like(u), torch.empty_like(u)
    for fields, mask in ((SHAPES, inside), (TEXTURES, lit)):
        for index, field in enumerate(fields.values()):
            rows = labels % len(fields) == index
            mask[rows] = field(u[rows], v[rows]).float()
    bands = math.ceil(classes / COMBINATIONS)
    hue = (labels.view(-1, 1, 1) // COMBINATIONS + uniform(0, 0.8)) / bands
    colour = 1 + 0.5 * torch.cos(2 * math.pi * (hue + torch.arange(3).view(1, 3, 1) / 3))
    brightness = inside * (2 * lit - 1)
    noise = torch.randn(len(labels), 3, resolution, resolution, generator=generator)
    return colour.unsqueeze(-1) * brightness.unsqueeze(1) + 0.3 * noise


def gratings(labels: torch.Tensor, classes: int, resolution: int, generator: torch.Generator) -> torch.Tensor:
    """Noisy stripes `[image, 3, resolution, resolution]`; each class has its own orientation and hue."""
    count = len(labels)
    turn = labels.view(-1, 1, 1) / classes
    thirds = torch.arange(3).view(1, 3, 1) / 3
    colour = 0.5 + 0.5 * torch.cos(2 * math.pi * (turn + thirds))
    cycles = 2 + 2 * torch.rand(count, 1, 1, generator=generator)
    phase = torch.rand(count, 1, 1, generator=generator)
    y, x = torch.meshgrid(*[torch.linspace(0, 1, resolution)] * 2, indexing="ij")
    across = x * torch.cos(math.pi * turn) + y * torch.sin(math.pi * turn)
    brightness = 1 + torch.sin(2 * math.pi * (cycles * across + phase))
    noise = torch.randn(count, 3, resolution, resolution, generator=generator)
    return colour.unsqueeze(-1) * brightness.unsqueeze(1) + 0.5 * noise
