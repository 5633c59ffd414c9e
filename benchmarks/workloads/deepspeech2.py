"""Deep Speech 2 (Amodei et al. 2016): from a spectrogram to the labels said in it, learnt without their times.

Two convolutions that halve time once and frequency twice, bidirectional LSTMs with BatchNorm over whole sequences
between them, and connectionist temporal classification. The speech is synthesised: vowels as moving formants in noise.
"""

import functools
import itertools

import torch
from torch import nn

from benchmarks.workloads.ctc import collapse, ctc_loss
from benchmarks.workloads.data.vowels import FORMANTS, SHORTEST_VOWEL, synthesise, utterances
from benchmarks.workloads.metrics import label_error_rate
from benchmarks.workloads.workload import (
    Batch,
    Workload,
    batch_generator,
    evaluating,
    held_out_generator,
    recurrent_learning_rate,
)
from encore.errors import OptionError

HELD_OUT_ROWS = 32
LABELS = ["", *FORMANTS]
"""The blank, and the vowels by the words they are read in."""


class SequenceNorm(nn.Module):
    """BatchNorm of each feature over all frames of all utterances."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return normed


class BidirectionalLayer(nn.Module):
    """An LSTM in each direction, added up."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(x)
        forwards, backwards = outputs.chunk(2, dim=-1)
        return forwards + backwards


class DeepSpeech2(nn.Module):
    """Convolutions, recurrent layers and a classifier of frames; returns the mean negative log-likelihood a label."""

    def __init__(self, bins: int, channels: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=(11, 41), stride=(2, 2), padding=(5, 20), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, kernel_size=(11, 21), stride=(1, 2), padding=(5, 10), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
        )
        self.layers = nn.Sequential(BidirectionalLayer(channels * ((bins + 3) // 4), hidden))
        for _ in range(layers - 1):
            self.layers.extend([SequenceNorm(hidden), BidirectionalLayer(hidden, hidden)])
        self.classifier = nn.Sequential(SequenceNorm(hidden), nn.Linear(hidden, len(LABELS)))

    def forward(self, features: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return ctc_loss(self.logits(features).log_softmax(dim=-1), labels, lengths)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """What is said in every other frame `[row, frame, bin]`: `[row, frame / 2, label]`."""
        maps = self.convolutions(features.unsqueeze(1))  # [row, channel, frame, bin]
        logits: torch.Tensor = self.classifier(self.layers(maps.transpose(1, 2).flatten(2)))
        return logits

    def transcribe(self, features: torch.Tensor) -> list[list[int]]:
        """The labels of each row, by the likeliest one of every frame."""
        return [collapse(row) for row in self.logits(features).argmax(dim=-1).tolist()]


def workload(
    *,
    batch_size: int = 16,
    frames: int = 160,
    bins: int = 64,
    channels: int = 32,
    hidden: int = 256,
    layers: int = 3,
) -> Workload:
    """Utterances of `frames` frames of `bins` frequencies; a batch is the features, the labels and their numbers."""
    if frames < SHORTEST_VOWEL:
        raise OptionError(f"frames={frames} is too short for a vowel: {SHORTEST_VOWEL} at least")
    most = -(-frames // SHORTEST_VOWEL)

    def speech(count: int, generator: torch.Generator) -> Batch:
        vowels = utterances(count, frames, generator)
        said = [[1 + vowel for vowel, _ in itertools.groupby(row)] for row in vowels.tolist()]
        labels = torch.tensor([row + [0] * (most - len(row)) for row in said])
        return synthesise(vowels, bins, generator), labels, torch.tensor([len(row) for row in said])

    @functools.cache
    def held_out() -> tuple[torch.Tensor, list[list[int]]]:
        features, labels, lengths = speech(HELD_OUT_ROWS, held_out_generator())
        return features, [row[:length] for row, length in zip(labels.tolist(), lengths.tolist(), strict=True)]

    def score(model: nn.Module) -> dict[str, float]:
        features, labels = held_out()
        with evaluating(model) as network:
            return {"label error rate": label_error_rate(network.transcribe(features), labels)}

    def sample(model: nn.Module) -> str:
        features, labels = held_out()
        with evaluating(model) as network:
            heard = network.transcribe(features[:3])
        lines = []
        for found, said in zip(heard, labels[:3], strict=True):
            lines += [
                f"{verb} {' '.join(LABELS[label] for label in row)}"
                for verb, row in (("said: ", said), ("heard:", found))
            ]
        return "\n".join(lines)

    def batch(index: int) -> Batch:
        return speech(batch_size, batch_generator(index))

    model = DeepSpeech2(bins, channels, hidden, layers)
    return Workload("deepspeech2", model, batch, score, recurrent_learning_rate(hidden), sample)
