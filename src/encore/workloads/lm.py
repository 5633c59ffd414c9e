"""A character-level LSTM language model, reading sentences of a small English grammar.

The loop over time is a Python loop over a written-out cell, so the graph grows with `steps`. In the grammar
a verb agrees with a subject that may stand several words before it: the LSTM has something to remember.
"""

import torch
from torch import nn
from torch.nn import functional as F

from encore.workloads.cell import LSTMStack
from encore.workloads.workload import Batch, Workload, batch_generator

GRAMMAR: dict[str, tuple[str, ...]] = {
    "SENTENCE": ("SINGULAR SLEEPS .", "PLURAL SLEEP .", "SINGULAR SEES OBJECT .", "PLURAL SEE OBJECT ."),
    "SINGULAR": ("the ONE", "a ONE", "the ONE near OBJECT", "a ONE that SEES OBJECT"),
    "PLURAL": ("the MANY", "two MANY", "the MANY near OBJECT", "two MANY that SEE OBJECT"),
    "OBJECT": ("SINGULAR", "the ONE", "the MANY", "some MANY"),
    "ONE": ("cat", "bird", "child", "grey fox", "small horse"),
    "MANY": ("cats", "birds", "children", "grey foxes", "small horses"),
    "SLEEPS": ("sleeps", "sings", "waits in the garden"),
    "SLEEP": ("sleep", "sing", "wait in the garden"),
    "SEES": ("sees", "follows", "likes"),
    "SEE": ("see", "follow", "like"),
}
"""Each capitalised symbol with the texts it may become; whatever is not a symbol is a word."""

ALPHABET = " .abcdefghijklmnopqrstuvwxyz"


class LanguageModel(nn.Module):
    """Predicts each character from all those before it, and returns the mean cross entropy in nats."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), hidden)
        self.lstm = LSTMStack(hidden, hidden, layers)
        self.projection = nn.Linear(hidden, len(ALPHABET))

    def forward(self, characters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(characters)
        states = self.lstm.initial_states(embedded)
        outputs = []
        for x in embedded.unbind(1):
            states = self.lstm(x, states)
            outputs.append(states[-1][0])
        logits = self.projection(torch.stack(outputs, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def expand(symbol: str, generator: torch.Generator) -> list[str]:
    """A random derivation of `symbol`, as words."""
    if symbol not in GRAMMAR:
        return [symbol]
    choices = GRAMMAR[symbol]
    chosen = choices[int(torch.randint(len(choices), (), generator=generator))]
    return [word for part in chosen.split() for word in expand(part, generator)]


def text(length: int, generator: torch.Generator) -> str:
    """The first `length` characters of a run of random sentences."""
    written = ""
    while len(written) < length:
        written += " ".join(expand("SENTENCE", generator)) + " "
    return written[:length]


def workload(*, batch_size: int = 64, hidden: int = 256, layers: int = 2, steps: int = 128) -> Workload:
    """Sequences of `steps` characters; a batch is the characters and, for each, the one that follows."""

    def batch(index: int) -> Batch:
        generator = batch_generator(index)
        lines = [text(steps + 1, generator) for _ in range(batch_size)]
        codes = torch.tensor([[ALPHABET.index(character) for character in line] for line in lines])
        return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()

    return Workload("lm", LanguageModel(hidden, layers), batch)
