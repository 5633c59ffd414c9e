"""An acoustic model in the manner of Deep Speech 2 (Amodei et al. 2016), naming the vowel of every frame.

Two convolutions with BatchNorm over time and frequency, then `torch.nn.LSTM` in both directions, unchanged:
at its best one fused operation a layer and direction, and a place where torch.compile breaks the graph. The
features are synthesised from the mean formants that Peterson and Barney (1952) measured, for vocal tracts of
different length.
"""

import torch
from torch import nn
from torch.nn import functional as F

from encore.workloads.workload import Batch, Workload, batch_generator

FORMANTS: dict[str, tuple[int, int, int]] = {
    "heed": (270, 2290, 3010),
    "hid": (390, 1990, 2550),
    "head": (530, 1840, 2480),
    "had": (660, 1720, 2410),
    "hod": (730, 1090, 2440),
    "hawed": (570, 840, 2410),
    "hood": (440, 1020, 2240),
    "who'd": (300, 870, 2240),
    "hud": (640, 1190, 2390),
    "heard": (490, 1350, 1690),
}
"""The first three resonances in hertz of each vowel, by the word it was read in."""

HIGHEST_HERTZ = 4000.0
MEAN_FRAMES_PER_VOWEL = 8


class AcousticModel(nn.Module):
    """Convolutions, a bidirectional LSTM and a classifier; returns the mean cross entropy of a frame."""

    def __init__(self, bins: int, channels: int, hidden: int, layers: int) -> None:
        super().__init__()
        # Stride in frequency only: every frame keeps its own label.
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=(11, 5), padding=(5, 2), bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=(5, 5), stride=(1, 2), padding=(2, 2), bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        self.lstm = nn.LSTM(
            channels * ((bins + 1) // 2), hidden, num_layers=layers, batch_first=True, bidirectional=True
        )
        self.classifier = nn.Linear(2 * hidden, len(FORMANTS))

    def forward(self, features: torch.Tensor, vowels: torch.Tensor) -> torch.Tensor:
        maps = self.convolutions(features.unsqueeze(1))  # [batch, channel, frame, bin]
        outputs, _ = self.lstm(maps.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.classifier(outputs).flatten(0, 1), vowels.flatten())


def mel(hertz: torch.Tensor) -> torch.Tensor:
    """Pitch as it is heard: linear below a kilohertz, logarithmic above."""
    return 2595 * torch.log10(1 + hertz / 700)


def random_vowels(rows: int, frames: int, generator: torch.Generator) -> torch.Tensor:
    """The vowel of each frame `[row, frame]`, changing at random moments."""
    changes = torch.rand(rows, frames, generator=generator) < 1 / MEAN_FRAMES_PER_VOWEL
    changes[:, 0] = False
    by_segment = torch.randint(len(FORMANTS), (rows, frames), generator=generator)
    return by_segment.gather(1, changes.long().cumsum(dim=1))


def synthesise(vowels: torch.Tensor, bins: int, generator: torch.Generator) -> torch.Tensor:
    """Mel-spectrogram-like features `[row, frame, bin]`: a ridge along each formant's track, and noise."""
    tract_length = 0.9 + 0.2 * torch.rand(len(vowels), 1, 1, generator=generator)
    targets = torch.tensor(list(FORMANTS.values()), dtype=torch.float32)[vowels] / tract_length
    # The mouth takes a few frames to move from one vowel to the next.
    tracks = F.avg_pool1d(targets.transpose(1, 2), 5, stride=1, padding=2, count_include_pad=False)
    ridge_positions = mel(tracks).transpose(1, 2).unsqueeze(-1)  # [row, frame, formant, 1]
    bin_positions = torch.linspace(0, float(mel(torch.tensor(HIGHEST_HERTZ))), bins)
    ridges = torch.exp(-0.5 * ((bin_positions - ridge_positions) / 80) ** 2).sum(dim=2)
    return ridges + 0.3 * torch.randn(ridges.shape, generator=generator)


def workload(
    *,
    batch_size: int = 32,
    frames: int = 100,
    bins: int = 64,
    channels: int = 32,
    hidden: int = 256,
    layers: int = 2,
) -> Workload:
    """Utterances of `frames` frames of `bins` frequencies; a batch is the features and the vowels."""

    def batch(index: int) -> Batch:
        generator = batch_generator(index)
        vowels = random_vowels(batch_size, frames, generator)
        return synthesise(vowels, bins, generator), vowels

    return Workload("speech", AcousticModel(bins, channels, hidden, layers), batch)
