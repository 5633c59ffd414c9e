"""A corpus of the project's grammar whose texts have lengths of Zipf's law, in shuffled batches padded to the longest.

Short texts are many and long ones few: the i-th length of a text is drawn with a probability of 1 / i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.data import sentences
from benchmarks.workloads.workload import Batch, batch_generator

PADDING = 0
"""Words count from 1."""
SHORTEST = 6


class PaddedLanguageModel(nn.Module):
    """An LSTM that predicts the next word; padding does not count in the mean cross entropy."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        words = 1 + len(sentences.WORDS)
        self.embedding = nn.Embedding(words, hidden, padding_idx=PADDING)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.projection = nn.Linear(hidden, words)

    def forward(self, words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.embedding(words))
        return F.cross_entropy(self.projection(outputs).flatten(0, 1), following.flatten(), ignore_index=PADDING)


@dataclass(frozen=True)
class Corpus:
    """An epoch: batches in the order in which they are trained on."""

    batches: tuple[Batch, ...]

    @property
    def longest(self) -> Batch:
        """The batch with the most words in a row."""
        return max(self.batches, key=lambda batch: batch[0].shape[1])

    @property
    def lengths(self) -> int:
        """How many different lengths there are."""
        return len({batch[0].shape[1] for batch in self.batches})


def zipf_corpus(*, texts: int, batch_size: int, longest: int) -> Corpus:
    """Draw texts of at most so many words, and shuffle them into batches; the same each time."""
    generator = batch_generator(0)
    weights = 1.0 / torch.arange(1, longest - SHORTEST + 2, dtype=torch.float64)
    drawn = torch.multinomial(weights, texts, replacement=True, generator=generator)
    number = {word: place + 1 for place, word in enumerate(sentences.WORDS)}
    written = [
        torch.tensor([number[word] for word in sentences.words(SHORTEST + more + 1, generator, held_out=False)])
        for more in drawn.tolist()
    ]
    batches = []
    for first in range(0, texts, batch_size):
        rows = nn.utils.rnn.pad_sequence(written[first : first + batch_size], batch_first=True, padding_value=PADDING)
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return Corpus(tuple(batches))
