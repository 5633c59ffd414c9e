"""Network in Network (Lin, Chen, Yan 2014), the ImageNet version: each convolution is followed by two of one pixel,
and the classes are the means of the last maps."""

from torch import nn

from benchmarks.workloads.image_classes import ImageClassifier, convolution, image_workload, size_after
from benchmarks.workloads.workload import Workload


def perceptron(inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    """A convolution that is a small network of its own, slid over the image."""
    return [
        *convolution(inputs, outputs, kernel, stride=stride, padding=padding),
        *convolution(outputs, outputs, 1),
        *convolution(outputs, outputs, 1),
    ]


class NetworkInNetwork(ImageClassifier):
    """Four such networks; no layer sees the whole map but by averaging it."""

    def __init__(self, width: int, resolution: int, classes: int, dropout: float) -> None:
        features = nn.Sequential(
            *perceptron(3, 3 * width, 11, stride=4),
            nn.MaxPool2d(3, stride=2),
            *perceptron(3 * width, 8 * width, 5, padding=2),
            nn.MaxPool2d(3, stride=2),
            *perceptron(8 * width, 12 * width, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            nn.Dropout(dropout),
        )
        size_after(features, resolution)
        classifier = nn.Sequential(
            *convolution(12 * width, 32 * width, 3, padding=1),
            *convolution(32 * width, 32 * width, 1),
            nn.Conv2d(32 * width, classes, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        super().__init__(features, classifier)


def workload(
    *, batch_size: int = 64, width: int = 32, resolution: int = 224, classes: int = 10, dropout: float = 0.5
) -> Workload:
    """The first layer has three times `width` channels, the others in proportion; images are squares of `resolution`
    pixels."""
    return image_workload(
        "nin",
        NetworkInNetwork(width, resolution, classes, dropout),
        batch_size=batch_size,
        resolution=resolution,
        classes=classes,
        learning_rate=min(1e-3, 0.02 / width),
    )
