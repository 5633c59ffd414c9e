"""Pictures with a class each: noisy stripes, and coloured shapes filled with textures."""

import math

import torch


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
