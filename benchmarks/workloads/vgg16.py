"""VGG-16 (Simonyan, Zisserman 2015), configuration D: thirteen small convolutions, three layers over the whole map."""

from torch import nn

from benchmarks.workloads.image_classes import ImageClassifier, convolution, image_workload, size_after
from benchmarks.workloads.workload import Workload

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Channels, in widths, and convolutions of each stage; a pool ends it."""


class VGG16(ImageClassifier):
    """Large maps at the bottom, large weights at the top."""

    def __init__(self, width: int, resolution: int, classes: int, dropout: float) -> None:
        features, channels = nn.Sequential(), 3
        for widths, count in STAGES:
            for _ in range(count):
                features.extend(convolution(channels, widths * width, 3, padding=1))
                channels = widths * width
            features.append(nn.MaxPool2d(2))
        classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * size_after(features, resolution) ** 2, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64 * width, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64 * width, classes),
        )
        super().__init__(features, classifier)


def workload(
    *, batch_size: int = 16, width: int = 64, resolution: int = 128, classes: int = 10, dropout: float = 0.5
) -> Workload:
    """The first layer has `width` channels, the others in proportion; images are squares of `resolution` pixels."""
    return image_workload(
        "vgg16",
        VGG16(width, resolution, classes, dropout),
        batch_size=batch_size,
        resolution=resolution,
        classes=classes,
        learning_rate=min(1e-3, 0.02 / width),
    )
