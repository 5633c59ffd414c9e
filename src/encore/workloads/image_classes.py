"""What the image classifiers have in common: batches of drawn pictures, and accuracy on pictures never trained on."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from encore.workloads.metrics import accuracy
from encore.workloads.workload import Batch, Workload, batch_generator, evaluating, held_out_generator

Draw: TypeAlias = Callable[[torch.Tensor, int, int, torch.Generator], torch.Tensor]
"""From labels, the number of classes and a resolution to pictures `[picture, 3, resolution, resolution]`."""

MOST_PICTURES, FEWEST_PICTURES, PIXELS = 256, 32, 2**20
CHUNK = 32


def image_workload(
    name: str, model: nn.Module, draw: Draw, batch_size: int, resolution: int, classes: int, *, learning_rate: float
) -> Workload:
    """A workload around a classifier with a method `logits(images)`; a batch is the images and the labels.

    Pictures are scored on in a number that falls with their size, so that scoring takes seconds at most.
    """

    def pictures(count: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(classes, (count,), generator=generator)
        return draw(labels, classes, resolution, generator), labels

    @functools.cache
    def held_out() -> Batch:
        count = min(MOST_PICTURES, max(FEWEST_PICTURES, PIXELS // resolution**2))
        return pictures(count, held_out_generator())

    def score(model: nn.Module) -> dict[str, float]:
        images, labels = held_out()
        with evaluating(model) as network:
            logits = torch.cat([network.logits(some) for some in images.split(CHUNK)])
        return {"accuracy": accuracy(logits, labels)}

    return Workload(name, model, lambda index: pictures(batch_size, batch_generator(index)), score, learning_rate)
