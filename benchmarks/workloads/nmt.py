"""Neural machine translation: LSTM encoder and decoder with additive attention (Bahdanau, Cho, Bengio 2015).

The task is to translate written-out numbers, or diary entries with dates, from English to German, whose units come
before the tens ("twenty one" is "ein und zwanzig"), so attention has a word order to learn; or whatever two parallel
files of the user's hold. At each decoder step the scorer
makes feature maps as large as the whole encoded source, from one small state and keys that all steps share:
the O shape that Echo recomputes (Zheng, Vijaykumar, Pekhimenko 2020).
"""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.cell import LSTMStack, State
from benchmarks.workloads.data.parallel import TASKS, Pair, ParallelText
from benchmarks.workloads.data.parallel_files import parallel_files
from benchmarks.workloads.data.vocabulary import BEGIN, END, PAD
from benchmarks.workloads.metrics import bleu, exact_match
from benchmarks.workloads.workload import (
    Batch,
    Workload,
    batch_generator,
    evaluating,
    held_out_generator,
    recurrent_learning_rate,
)
from encore.errors import OptionError, listed

MOST_LAYERS = 4
HELD_OUT_SENTENCES = 64


class AdditiveAttention(nn.Module):
    """Scores every source position against the decoder's state with a one-hidden-layer perceptron."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.from_state = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(
        self, state: torch.Tensor, keys: torch.Tensor, encoded: torch.Tensor, is_padding: torch.Tensor
    ) -> torch.Tensor:
        """The mean of `encoded` under the weights that `state` gives to the source positions."""
        scores = self.score(torch.tanh(keys + self.from_state(state).unsqueeze(1))).squeeze(-1)
        weights = scores.masked_fill(is_padding, float("-inf")).softmax(dim=-1)
        return torch.bmm(weights.unsqueeze(1), encoded).squeeze(1)


class Translator(nn.Module):
    """Encoder, attention and decoder with teacher forcing; returns the mean cross entropy of a word."""

    def __init__(self, source_words: int, target_words: int, hidden: int, layers: int, decoder_layers: int) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(source_words, hidden, padding_idx=PAD)
        self.target_embedding = nn.Embedding(target_words, hidden, padding_idx=PAD)
        self.encoder = LSTMStack(hidden, hidden, layers)
        self.decoder = LSTMStack(2 * hidden, hidden, decoder_layers)
        self.keys = nn.Linear(hidden, hidden, bias=False)
        self.attention = AdditiveAttention(hidden)
        self.readout = nn.Linear(2 * hidden, hidden)
        self.projection = nn.Linear(hidden, target_words)

    def forward(self, source: torch.Tensor, previous: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        encoded, states = self.encode(source)
        keys, is_padding = self.keys(encoded), source == PAD
        readouts = []
        for x in self.target_embedding(previous).unbind(1):
            readout, states = self.decode(x, states, keys, encoded, is_padding)
            readouts.append(readout)
        logits = self.projection(torch.stack(readouts, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, list[State]]:
        """What the last layer says of every source position, and the states in which the decoder begins.

        A decoder layer begins in the last state of the encoder layer beside it, or of the last one.
        """
        embedded = self.source_embedding(source)
        states = self.encoder.initial_states(embedded)
        outputs = []
        for x in embedded.unbind(1):
            states = self.encoder(x, states)
            outputs.append(states[-1][0])
        beside = [states[min(layer, len(states) - 1)] for layer in range(len(self.decoder.cells))]
        return torch.stack(outputs, dim=1), beside

    def decode(
        self,
        x: torch.Tensor,
        states: list[State],
        keys: torch.Tensor,
        encoded: torch.Tensor,
        is_padding: torch.Tensor,
    ) -> tuple[torch.Tensor, list[State]]:
        """One step: what the next word is to be projected from, and the next states."""
        context = self.attention(states[-1][0], keys, encoded, is_padding)
        states = self.decoder(torch.cat([x, context], dim=-1), states)
        return torch.tanh(self.readout(torch.cat([states[-1][0], context], dim=-1))), states

    def translate(self, source: torch.Tensor, steps: int) -> torch.Tensor:
        """At most `steps` words for each row of `source`, the likeliest each time; padding follows on `END`."""
        encoded, states = self.encode(source)
        keys, is_padding = self.keys(encoded), source == PAD
        word = source.new_full(source.shape[:1], BEGIN)
        written = []
        for _ in range(steps):
            has_ended = (word == END) | (word == PAD)
            readout, states = self.decode(self.target_embedding(word), states, keys, encoded, is_padding)
            word = self.projection(readout).argmax(dim=-1).masked_fill(has_ended, PAD)
            written.append(word)
        return torch.stack(written, dim=1)


def workload(
    *,
    batch_size: int = 128,
    hidden: int = 256,
    layers: int = 2,
    decoder_layers: int | None = None,
    steps: int = 24,
    task: str = "numbers",
    source: str | None = None,
    target: str | None = None,
    vocabulary: int = 8_000,
) -> Workload:
    """Sentences padded to `steps` words; a batch is the source, the previous target words, and the target.

    Encoder and decoder have `layers` layers each, the decoder `decoder_layers` if it is to have another number. The
    text is that of the `task`, or that of the files `source` and `target`, with at most `vocabulary` words a side.
    """
    decoder_layers = layers if decoder_layers is None else decoder_layers
    for side, count in (("layers", layers), ("decoder_layers", decoder_layers)):
        if not 1 <= count <= MOST_LAYERS:
            raise OptionError(f"{side}={count} is out of range: 1 to {MOST_LAYERS}")
    text = parallel_text(task, source, target, steps, vocabulary)

    @functools.cache
    def held_out() -> tuple[torch.Tensor, list[Pair]]:
        generator = held_out_generator()
        pairs = [text.pair(generator, True) for _ in range(HELD_OUT_SENTENCES)]
        return as_batch(pairs, text, steps)[0], pairs

    def translations(model: nn.Module, source: torch.Tensor) -> list[list[str]]:
        with evaluating(model) as network:
            return [text.target.decode(row) for row in network.translate(source, steps).tolist()]

    def score(model: nn.Module) -> dict[str, float]:
        source, pairs = held_out()
        found, wanted = translations(model, source), [target for _, target in pairs]
        return {"exact match": exact_match(found, wanted), "BLEU": bleu(found, wanted)}

    def sample(model: nn.Module) -> str:
        source, pairs = held_out()
        lines = []
        for found, (read, wanted) in zip(translations(model, source[:3]), pairs[:3], strict=True):
            lines += [f"source:      {' '.join(read)}", f"translation: {' '.join(found)}"]
            lines += [] if found == wanted else [f"reference:   {' '.join(wanted)}"]
        return "\n".join(lines)

    def batch(index: int) -> Batch:
        generator = batch_generator(index)
        return as_batch([text.pair(generator, False) for _ in range(batch_size)], text, steps)

    model = Translator(len(text.source), len(text.target), hidden, layers, decoder_layers)
    return Workload("nmt", model, batch, score, recurrent_learning_rate(hidden), sample)


def parallel_text(task: str, source: str | None, target: str | None, steps: int, vocabulary: int) -> ParallelText:
    """From the files, if both are given, or else from the grammar of the task."""
    if task not in TASKS:
        raise OptionError(f"no translation task is called {task!r}; known tasks: {listed(TASKS)}")
    if source is None and target is None:
        return TASKS[task](steps)
    if source is None or target is None:
        raise OptionError("a parallel text has two sides: give both source= and target=, or neither")
    return parallel_files(source, target, steps, vocabulary)


def as_batch(pairs: list[Pair], text: ParallelText, steps: int) -> Batch:
    """The source, the previous target words, and the target, each `[sentence, step]`."""
    sources, previous, targets = [], [], []
    for source_words, target_words in pairs:
        source, target = text.source.encode(source_words), text.target.encode(target_words)
        # Padding stands before the source, so that the encoder ends on a word and not on padding.
        sources.append([PAD] * (steps - len(source)) + source)
        padding = [PAD] * (steps - len(target) - 1)
        previous.append([BEGIN, *target, *padding])
        targets.append([*target, END, *padding])
    return torch.tensor(sources), torch.tensor(previous), torch.tensor(targets)
