"""An LSTM language model of characters or of words, reading sentences of a small English grammar.

The loop over time is a Python loop over a written-out cell, so the graph grows with `steps`; or it is inside of
`torch.nn.LSTM`, unchanged. In the grammar a verb agrees with a subject that may stand several words before it: the LSTM
has something to remember.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.cell import LSTMStack
from benchmarks.workloads.data import sentences
from benchmarks.workloads.metrics import perplexity
from benchmarks.workloads.workload import (
    Batch,
    Workload,
    batch_generator,
    evaluating,
    held_out_generator,
    recurrent_learning_rate,
)
from encore.errors import OptionError, listed

HELD_OUT_ROWS = 32
LEVELS = {
    "character": (list(sentences.ALPHABET), sentences.characters, ""),
    "word": (sentences.WORDS, sentences.words, " "),
}
"""For each kind of symbol: all of them, how they are made, and what stands between two of them in print."""


class LanguageModel(nn.Module):
    """Predicts each symbol from all those before it, and returns the mean cross entropy in nats."""

    def __init__(self, symbols: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, hidden)
        self.lstm: Any = self.recurrence(hidden, layers)
        self.projection = nn.Linear(hidden, symbols)

    def recurrence(self, hidden: int, layers: int) -> nn.Module:
        return LSTMStack(hidden, hidden, layers)

    def forward(self, symbols: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(symbols).flatten(0, 1), following.flatten())

    def logits(self, symbols: torch.Tensor) -> torch.Tensor:
        """What may follow each of the `symbols` `[row, step]`: `[row, step, symbol]`."""
        embedded = self.embedding(symbols)
        states = self.lstm.initial_states(embedded)
        outputs = []
        for x in embedded.unbind(1):
            states = self.lstm(x, states)
            outputs.append(states[-1][0])
        logits: torch.Tensor = self.projection(torch.stack(outputs, dim=1))
        return logits

    def write(self, beginning: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        """The `beginning` `[row, step]` and `count` more symbols, each drawn from what the model expects."""
        states = self.lstm.initial_states(self.embedding(beginning))
        written = list(beginning.unbind(1))
        for step in range(beginning.shape[1] + count - 1):
            states = self.lstm(self.embedding(written[step]), states)
            if step + 1 == len(written):
                expected = self.projection(states[-1][0]).softmax(dim=-1)
                written.append(torch.multinomial(expected, 1, generator=generator).squeeze(1))
        return torch.stack(written, dim=1)


class LayeredLanguageModel(LanguageModel):
    """The same with `torch.nn.LSTM` for the loop over time."""

    def recurrence(self, hidden: int, layers: int) -> nn.Module:
        return nn.LSTM(hidden, hidden, layers, batch_first=True)

    def logits(self, symbols: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.embedding(symbols))
        logits: torch.Tensor = self.projection(outputs)
        return logits

    def write(self, beginning: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        written, latest, states = beginning, beginning, None
        for _ in range(count):
            outputs, states = self.lstm(self.embedding(latest), states)
            expected = self.projection(outputs[:, -1]).softmax(dim=-1)
            latest = torch.multinomial(expected, 1, generator=generator)
            written = torch.cat((written, latest), dim=1)
        return written


MODELS = {"loop": LanguageModel, "layer": LayeredLanguageModel}
"""By who writes the loop over time: the model, or `torch.nn`."""


def workload(
    *,
    batch_size: int = 64,
    hidden: int = 256,
    layers: int = 2,
    steps: int = 128,
    level: str = "character",
    lstm: str = "loop",
) -> Workload:
    """Sequences of `steps` characters or words; a batch is the symbols and, for each, the one that follows."""
    if level not in LEVELS:
        raise OptionError(f"no language model of level {level!r}; known levels: {listed(LEVELS)}")
    if lstm not in MODELS:
        raise OptionError(f"no language model with lstm={lstm!r}; there are {listed(MODELS)}")
    symbols, made, between = LEVELS[level]
    code = {symbol: number for number, symbol in enumerate(symbols)}

    def rows(count: int, generator: torch.Generator, *, held_out: bool) -> Batch:
        lines = [made(steps + 1, generator, held_out=held_out) for _ in range(count)]
        codes = torch.tensor([[code[symbol] for symbol in line] for line in lines])
        return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()

    @functools.cache
    def held_out() -> Batch:
        return rows(HELD_OUT_ROWS, held_out_generator(), held_out=True)

    def score(model: nn.Module) -> dict[str, float]:
        read, following = held_out()
        with evaluating(model) as network:
            return {"perplexity": perplexity(network.logits(read), following)}

    def sample(model: nn.Module) -> str:
        beginning = torch.tensor([[code["the"]] if level == "word" else [code[symbol] for symbol in "the "]] * 3)
        with evaluating(model) as network:
            written = network.write(beginning, min(steps, 60), held_out_generator())
        return "\n".join(between.join(symbols[number] for number in line) for line in written.tolist())

    def batch(index: int) -> Batch:
        return rows(batch_size, batch_generator(index), held_out=False)

    model = MODELS[lstm](len(symbols), hidden, layers)
    return Workload("lm", model, batch, score, recurrent_learning_rate(hidden), sample)
