"""Equal blocks of a Transformer's perceptron, each behind a hook that no compiler looks into.

Sharded data parallelism (FSDP2), profilers and users put such hooks there; each ends a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.workload import Batch, CutWorkload, batch_generator


@torch.compiler.disable
def opaque(module: nn.Module, args: Any) -> None:
    """A hook that is not captured."""


class Block(nn.Module):
    """`x + mlp(norm(x))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class HookedBlocks(nn.Module):
    """The mean square of what the last block returns."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        for block in self.blocks:
            block.register_forward_pre_hook(opaque)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def forward(model: nn.Module, x: torch.Tensor) -> Any:
    """One step of training, up to its loss, which the model returns."""
    return model(x)


def workload(*, batch_size: int = 1024, width: int = 256, layers: int = 8) -> CutWorkload:
    """Random rows."""

    def batch(index: int) -> Batch:
        return (torch.randn(batch_size, width, generator=batch_generator(index)),)

    return CutWorkload("blocks", HookedBlocks(layers, width), batch, forward, ("Block",))
