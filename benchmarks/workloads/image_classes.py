"""What the image classifiers have in common: layers and a loss, drawn pictures, and accuracy on pictures never seen."""

import functools
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.data.pictures import class_name, shapes
from benchmarks.workloads.metrics import accuracy
from benchmarks.workloads.workload import Batch, Workload, batch_generator, evaluating, held_out_generator
from encore.errors import OptionError

Draw: TypeAlias = Callable[[torch.Tensor, int, int, torch.Generator], torch.Tensor]
"""From labels, the number of classes and a resolution to pictures `[picture, 3, resolution, resolution]`."""

MOST_PICTURES, FEWEST_PICTURES, PIXELS = 256, 32, 2**19
CHUNK = 32


class ImageClassifier(nn.Module):
    """Layers that turn images into logits; returns the mean cross entropy of the labels."""

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                assert module.bias is not None
                # With no normalisation between the layers, it is the weights that keep the scale (He et al. 2015).
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(images), labels)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """What each of the images may show: `[image, class]`."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    """A convolution and its ReLU, which works in place."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]


def size_after(layers: Iterable[nn.Module], resolution: int) -> int:
    """The side of the maps that convolutions and pools, one after another, make of an image of this side; or an error
    that tells the smallest image they can read."""

    def side(size: int) -> int:
        for layer in windows:
            kernel, stride, padding = (int(_one(getattr(layer, of))) for of in ("kernel_size", "stride", "padding"))
            size = (size + 2 * padding - kernel) // stride + 1
        return size

    windows = [layer for layer in layers if isinstance(layer, nn.Conv2d | nn.MaxPool2d)]
    if (size := side(resolution)) >= 1:
        return size
    smallest = next(larger for larger in range(resolution, 1000) if side(larger) >= 1)
    raise OptionError(f"resolution={resolution} is too small for this network: {smallest} at least")


def _one(sides: int | tuple[int, int]) -> int:
    return sides if isinstance(sides, int) else sides[0]


def image_workload(
    name: str,
    model: nn.Module,
    *,
    batch_size: int,
    resolution: int,
    classes: int,
    learning_rate: float,
    draw: Draw = shapes,
    called: Callable[[int], str] | None = class_name,
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

    def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        with evaluating(model) as network:
            return torch.cat([network.logits(some) for some in images.split(CHUNK)])

    def score(model: nn.Module) -> dict[str, float]:
        images, labels = held_out()
        return {"accuracy": accuracy(logits(model, images), labels)}

    def sample(model: nn.Module) -> str:
        assert called is not None
        images, labels = (tensor[:4] for tensor in held_out())
        taken = logits(model, images).argmax(dim=-1)
        pairs = zip(labels.tolist(), taken.tolist(), strict=True)
        return "\n".join(f"{called(label)}: taken for {called(found)}" for label, found in pairs)

    def batch(index: int) -> Batch:
        return pictures(batch_size, batch_generator(index))

    return Workload(name, model, batch, score, learning_rate, sample if called else None)
