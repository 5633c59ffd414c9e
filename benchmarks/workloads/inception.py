"""GoogLeNet, the first Inception network (Szegedy et al. 2015), without its helpers: the two auxiliary classifiers and
response normalisation."""

import torch
from torch import nn

from benchmarks.workloads.image_classes import ImageClassifier, convolution, image_workload
from benchmarks.workloads.workload import Workload

UNIT = 64
MODULES: dict[str, tuple[int, int, int, int, int, int]] = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Table 1 of the paper: channels of 1x1, before 3x3, 3x3, before 5x5, 5x5, after the pool, where `width` is 64."""


class Inception(nn.Module):
    """Four looks at the same maps, through windows of one, three and five pixels and a pool, side by side."""

    def __init__(self, inputs: int, channels: list[int]) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = channels
        self.looks = nn.ModuleList(
            [
                nn.Sequential(*convolution(inputs, one, 1)),
                nn.Sequential(*convolution(inputs, before_three, 1), *convolution(before_three, three, 3, padding=1)),
                nn.Sequential(*convolution(inputs, before_five, 1), *convolution(before_five, five, 5, padding=2)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), *convolution(inputs, pooled, 1)),
            ]
        )
        self.outputs = one + three + five + pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([look(x) for look in self.looks], dim=1)


class GoogLeNet(ImageClassifier):
    """A stem of three convolutions, nine Inception modules, and the mean of their maps."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        features = nn.Sequential(
            *convolution(3, width, 7, stride=2, padding=3),
            nn.MaxPool2d(3, stride=2, padding=1),
            *convolution(width, width, 1),
            *convolution(width, 3 * width, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        maps = 3 * width
        for name, channels in MODULES.items():
            module = Inception(maps, [max(1, count * width // UNIT) for count in channels])
            features.append(module)
            maps = module.outputs
            if name in ("3b", "4e"):
                features.append(nn.MaxPool2d(3, stride=2, padding=1))
        classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(maps, classes))
        super().__init__(features, classifier)


def workload(
    *, batch_size: int = 32, width: int = 64, resolution: int = 128, classes: int = 10, dropout: float = 0.4
) -> Workload:
    """The first layer has `width` channels, the others in proportion; images are squares of `resolution` pixels."""
    return image_workload(
        "inception",
        GoogLeNet(width, classes, dropout),
        batch_size=batch_size,
        resolution=resolution,
        classes=classes,
        learning_rate=min(1e-3, 0.02 / width),
    )
