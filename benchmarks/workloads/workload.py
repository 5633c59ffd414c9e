"""What a workload is: a model whose forward returns the training loss, batches to train it on, and a score."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

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

    score: Callable[[nn.Module], dict[str, float]]
    """Metrics by name on data that no batch contains, of `model` or of a compiled or loaded copy of it. The copy is
    left as it was, its mode included, and so is the global generator."""

    learning_rate: float
    """One at which Adam trains the model at its default and its tiny size."""

    sample: Callable[[nn.Module], str] | None = None
    """A few lines that show what the model does with data that no batch contains; None where nothing can be read."""


def batch_generator(index: int) -> torch.Generator:
    """The random numbers of batch `index`, and of no other."""
    return torch.Generator().manual_seed(index)


def recurrent_learning_rate(hidden: int) -> float:
    """Adam's for an LSTM of this width: sums over `hidden` units call for steps that shrink with their number."""
    return min(1e-2, 0.5 / hidden)


HELD_OUT_SEED = 2**40
"""Further than any training run counts its batches."""


def held_out_generator() -> torch.Generator:
    """The random numbers of data to score on: those of no batch."""
    return batch_generator(HELD_OUT_SEED)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Any]:
    """The model without gradients and in eval mode; afterwards every module of it is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class CutWorkload:
    """A training step that is no single call of a function: the loss is outside of the model, or Python decides what
    is called."""

    name: str
    model: nn.Module
    batch: Callable[[int], Batch]
    """Gives the i-th batch: the same for the same `i`, and without touching the global generator."""
    forward: Callable[..., Any]
    """`forward(model, *batch(i))` runs step `i` up to its loss. It returns what a loop keeps until backward has run, of
    which the loss is the only scalar. It seeds the generators: the same batch gives the same loss."""
    blocks: tuple[str, ...]
    """The classes of modules that `torch.utils.checkpoint` is put around, to compare with."""
