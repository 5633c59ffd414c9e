"""An acoustic model in the manner of Deep Speech 2 (Amodei et al. 2016), naming the vowel of every frame.

Two convolutions with BatchNorm over time and frequency, then `torch.nn.LSTM` in both directions, unchanged:
at its best one fused operation a layer and direction, and a place where torch.compile breaks the graph.
`deepspeech2` is its kin that learns from labels without their times.
"""

import functools
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.data.vowels import FORMANTS, random_vowels, synthesise
from benchmarks.workloads.metrics import accuracy, label_error_rate
from benchmarks.workloads.workload import Batch, Workload, batch_generator, evaluating, held_out_generator

HELD_OUT_ROWS = 64


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
        return F.cross_entropy(self.logits(features).flatten(0, 1), vowels.flatten())

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Which vowel each frame `[row, frame, bin]` may be of: `[row, frame, vowel]`."""
        maps = self.convolutions(features.unsqueeze(1))  # [row, channel, frame, bin]
        outputs, _ = self.lstm(maps.transpose(1, 2).flatten(2))
        logits: torch.Tensor = self.classifier(outputs)
        return logits


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

    def utterances(count: int, generator: torch.Generator) -> Batch:
        vowels = random_vowels(count, frames, generator)
        return synthesise(vowels, bins, generator), vowels

    @functools.cache
    def held_out() -> Batch:
        return utterances(HELD_OUT_ROWS, held_out_generator())

    def score(model: nn.Module) -> dict[str, float]:
        features, vowels = held_out()
        with evaluating(model) as network:
            logits = network.logits(features)
        heard, spoken = (list(map(said, rows.tolist())) for rows in (logits.argmax(dim=-1), vowels))
        return {"label error rate": label_error_rate(heard, spoken), "frame accuracy": accuracy(logits, vowels)}

    def sample(model: nn.Module) -> str:
        features, vowels = (tensor[:3] for tensor in held_out())
        with evaluating(model) as network:
            heard = network.logits(features).argmax(dim=-1)
        pairs = zip(vowels.tolist(), heard.tolist(), strict=True)
        return "\n".join(f"said:  {spelt(said(spoken))}\nheard: {spelt(said(frames))}" for spoken, frames in pairs)

    def batch(index: int) -> Batch:
        return utterances(batch_size, batch_generator(index))

    return Workload("speech", AcousticModel(bins, channels, hidden, layers), batch, score, 3e-3, sample)


def said(frames: list[int]) -> list[int]:
    """The vowels of an utterance, each once however many frames it lasts."""
    return [vowel for vowel, _ in itertools.groupby(frames)]


def spelt(vowels: list[int]) -> str:
    words = list(FORMANTS)
    return " ".join(words[vowel] for vowel in vowels)
