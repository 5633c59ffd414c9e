"""ResNet-50 and its deeper versions (He et al. 2016), telling noisy gratings apart.

Bottlenecks carry their stride in the 3x3 convolution ("v1.5", as in torchvision), and each ReLU works in
place, as is usual to save memory: a mutation that a compiler has to see through.
"""

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.data.pictures import gratings
from benchmarks.workloads.image_classes import image_workload
from benchmarks.workloads.workload import Workload
from encore.errors import OptionError

BLOCKS: dict[int, tuple[int, int, int, int]] = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Bottlenecks in each of the four stages, by the depth that names the network (table 1 of the paper)."""

EXPANSION = 4


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size but for its stride, and its BatchNorm, which makes a bias useless."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """Three convolutions (narrow, look around, widen) around which the input is carried and added."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.residual = nn.Sequential(
            *convolution(inputs, width, kernel=1),
            nn.ReLU(inplace=True),
            *convolution(width, width, kernel=3, stride=stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, kernel=1),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(*convolution(inputs, outputs, kernel=1, stride=stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """The whole network with its classifier; returns the mean cross entropy of the labels."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *convolution(3, width, kernel=7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        self.stages = nn.Sequential()
        channels = width
        for stage, count in enumerate(blocks):
            stage_width = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                self.stages.append(Bottleneck(channels, stage_width, stride))
                channels = EXPANSION * stage_width
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(images), labels)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """What each of the images may show: `[image, class]`."""
        logits: torch.Tensor = self.classifier(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return logits


def workload(
    *, batch_size: int = 16, depth: int = 50, width: int = 64, resolution: int = 128, classes: int = 10
) -> Workload:
    """Square images of `resolution` pixels; a batch is the images and the labels."""
    if depth not in BLOCKS:
        raise OptionError(f"no ResNet of depth {depth}; known depths: {', '.join(map(str, BLOCKS))}")
    model = ResNet(BLOCKS[depth], width, classes)
    return image_workload(
        "resnet152" if depth == 152 else "resnet",
        model,
        batch_size=batch_size,
        resolution=resolution,
        classes=classes,
        learning_rate=3e-3,
        draw=gratings,
        called=None,
    )


def workload_152(*, batch_size: int = 16, width: int = 64, resolution: int = 128, classes: int = 10) -> Workload:
    """The deepest of them, the one that Echo's authors measured."""
    return workload(batch_size=batch_size, depth=152, width=width, resolution=resolution, classes=classes)
