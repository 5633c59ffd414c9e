"""AlexNet (Krizhevsky, Sutskever, Hinton 2012) as one tower (Krizhevsky 2014), without response normalisation."""

from torch import nn

from benchmarks.workloads.image_classes import ImageClassifier, convolution, image_workload, size_after
from benchmarks.workloads.workload import Workload


class AlexNet(ImageClassifier):
    """Five convolutions, the first of them coarse, and three layers that see the whole map."""

    def __init__(self, width: int, resolution: int, classes: int, dropout: float) -> None:
        features = nn.Sequential(
            *convolution(3, width, 11, stride=4, padding=2),
            nn.MaxPool2d(3, stride=2),
            *convolution(width, 3 * width, 5, padding=2),
            nn.MaxPool2d(3, stride=2),
            *convolution(3 * width, 6 * width, 3, padding=1),
            *convolution(6 * width, 4 * width, 3, padding=1),
            *convolution(4 * width, 4 * width, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
        )
        classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(4 * width * size_after(features, resolution) ** 2, 64 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64 * width, 64 * width),
            nn.ReLU(inplace=True),
            nn.Linear(64 * width, classes),
        )
        super().__init__(features, classifier)


def workload(
    *, batch_size: int = 64, width: int = 64, resolution: int = 224, classes: int = 10, dropout: float = 0.5
) -> Workload:
    """The first layer has `width` channels, the others in proportion; images are squares of `resolution` pixels."""
    return image_workload(
        "alexnet",
        AlexNet(width, resolution, classes, dropout),
        batch_size=batch_size,
        resolution=resolution,
        classes=classes,
        learning_rate=min(1e-3, 0.02 / width),
    )
