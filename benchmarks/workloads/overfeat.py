"""OverFeat (Sermanet et al. 2014), the "fast" model, as a classifier."""

from torch import nn

from benchmarks.workloads.image_classes import ImageClassifier, convolution, image_workload, size_after
from benchmarks.workloads.workload import Workload


class OverFeat(ImageClassifier):
    """AlexNet's plan with pools that do not overlap and wide maps at the end."""

    def __init__(self, width: int, resolution: int, classes: int, dropout: float) -> None:
        features = nn.Sequential(
            *convolution(3, 3 * width, 11, stride=4),
            nn.MaxPool2d(2),
            *convolution(3 * width, 8 * width, 5),
            nn.MaxPool2d(2),
            *convolution(8 * width, 16 * width, 3, padding=1),
            *convolution(16 * width, 32 * width, 3, padding=1),
            *convolution(32 * width, 32 * width, 3, padding=1),
            nn.MaxPool2d(2),
        )
        classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(32 * width * size_after(features, resolution) ** 2, 96 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(96 * width, 128 * width),
            nn.ReLU(inplace=True),
            nn.Linear(128 * width, classes),
        )
        super().__init__(features, classifier)


def workload(
    *, batch_size: int = 32, width: int = 32, resolution: int = 231, classes: int = 10, dropout: float = 0.5
) -> Workload:
    """The first layer has three times `width` channels, the others in proportion; images are squares of `resolution`
    pixels."""
    return image_workload(
        "overfeat",
        OverFeat(width, resolution, classes, dropout),
        batch_size=batch_size,
        resolution=resolution,
        classes=classes,
        learning_rate=min(1e-3, 0.02 / width),
    )
