"""What a workload is: a model whose forward returns the training loss, and the batches to train it on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

Batch: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A model and its data: `model(*batch(i))` is the scalar loss of training step `i`."""

    name: str
    """The key under which `build` knows it."""

    model: nn.Module
    """In training mode, in float32, on the CPU; `forward(*batch)` returns the scalar loss."""

    batch: Callable[[int], Batch]
    """Gives the i-th batch: the same for the same `i`, and without touching the global generator."""


def batch_generator(index: int) -> torch.Generator:
    """The random numbers of batch `index`, and of no other."""
    return torch.Generator().manual_seed(index)
