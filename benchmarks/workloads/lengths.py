"""Training steps whose batches have lengths of their own: each batch is as long as its longest sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads import seq2seq
from benchmarks.workloads.seq2seq import Seq2Seq
from benchmarks.workloads.workload import Batch, batch_generator
from encore.errors import OptionError, listed

FIRST = 3
"""Words below are markers: padding, begin and end."""


@dataclass(frozen=True)
class LengthWorkload:
    """A model, and a batch of every length."""

    name: str
    model: nn.Module
    batch: Callable[[int], Batch]
    """Gives the batch of a length: the same for the same length."""
    forward: Callable[..., torch.Tensor]
    """`forward(model, *batch(length))` runs a step up to its loss; it seeds the generators."""
    lengths: tuple[int, int]
    """The shortest and the longest."""
    whole: bool
    """Whether no code is run once for every position."""


def _words(length: int, words: int, *shape: int) -> torch.Tensor:
    return torch.randint(FIRST, words, shape, generator=batch_generator(length))


def _called(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return model(*batch)  # type: ignore[no-any-return]


class Tagger(nn.Module):
    """A bidirectional LSTM that names every word of a sentence; returns the mean cross entropy."""

    def __init__(self, words: int, hidden: int, tags: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=layers, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, tags)

    def forward(self, sentences: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.embedding(sentences))
        return F.cross_entropy(self.classifier(outputs).flatten(0, 1), tags.flatten())


def tagger(*, batch_size: int = 32, words: int = 2000, hidden: int = 128, layers: int = 2) -> LengthWorkload:
    """Random words and tags."""

    def batch(length: int) -> Batch:
        return _words(length, words, batch_size, length), _words(length, 20, batch_size, length)

    return LengthWorkload("tagger", Tagger(words, hidden, 20, layers), batch, _called, (20, 180), whole=True)


class Translator(nn.Module):
    """An LSTM that reads, and a loop over an LSTM cell with attention that writes; returns the mean cross entropy."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.reader, self.writer = nn.Embedding(words, hidden), nn.Embedding(words, hidden)
        self.encoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.cell = nn.LSTMCell(2 * hidden, hidden)
        self.classifier = nn.Linear(2 * hidden, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        encoded, (hidden, cell) = self.encoder(self.reader(source))
        state, context, written = (hidden[0], cell[0]), encoded[:, 0], []
        for word in self.writer(target[:, :-1]).unbind(1):
            state = self.cell(torch.cat([word, context], dim=1), state)
            weights = torch.softmax(torch.bmm(encoded, state[0].unsqueeze(2)), dim=1)
            context = (weights * encoded).sum(dim=1)
            written.append(torch.cat([state[0], context], dim=1))
        scores = self.classifier(torch.stack(written, dim=1))
        return F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten())


def translator(*, batch_size: int = 32, words: int = 1000, hidden: int = 96) -> LengthWorkload:
    """Sentences of random words; a translation is as long as its source."""

    def batch(length: int) -> Batch:
        return _words(length, words, batch_size, length), _words(length + 1, words, batch_size, length)

    return LengthWorkload("loop", Translator(words, hidden), batch, _called, (4, 70), whole=False)


def coin_flips(*, batch_size: int = 16, words: int = 200, hidden: int = 64) -> LengthWorkload:
    """The tutorial's translator, which Dynamo cuts into calls, with its loss outside (`seq2seq.py`)."""
    sizes = (hidden, hidden, 0.1)
    model = Seq2Seq(seq2seq.Encoder(words, *sizes), seq2seq.Decoder(words, *sizes))

    def batch(length: int) -> Batch:
        return _words(length, words, length, batch_size), _words(length + 1, words, max(3, length // 2), batch_size)

    return LengthWorkload("seq2seq", model, batch, seq2seq.forward, (6, 100), whole=False)


def _hugging_face(name: str, model: nn.Module, words: int, batch_size: int, *, shorter: bool = False) -> LengthWorkload:
    def forward(model: nn.Module, read: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return model(input_ids=read, attention_mask=mask, labels=labels).loss  # type: ignore[no-any-return]

    def batch(length: int) -> Batch:
        read = _words(length, words, batch_size, length)
        ends = torch.randint(1, length + 1, (batch_size, 1), generator=batch_generator(length))
        ends[0] = length  # a batch is as long as its longest row
        mask = (torch.arange(length) < ends).long()
        written = _words(length + 1, words, batch_size, max(2, length // 2)) if shorter else read
        return read, mask, written

    return LengthWorkload(name, model, batch, forward, (16, 160), whole=True)


def bert(*, batch_size: int = 8, width: int = 64, layers: int = 2, words: int = 500) -> LengthWorkload:
    """BERT of transformers with masked rows."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * width,
    )  # fmt: skip
    return _hugging_face("bert", BertForMaskedLM(config), words, batch_size)


def llama(*, batch_size: int = 8, width: int = 64, layers: int = 2, words: int = 500) -> LengthWorkload:
    """Llama of transformers with masked rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=2 * width, use_cache=False,
    )  # fmt: skip
    return _hugging_face("llama", LlamaForCausalLM(config), words, batch_size)


def t5(*, batch_size: int = 8, width: int = 64, layers: int = 2, words: int = 500) -> LengthWorkload:
    """T5 of transformers; what it writes is half as long as what it reads."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=words, d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=layers, num_heads=4,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return _hugging_face("t5", T5ForConditionalGeneration(config), words, batch_size, shorter=True)


class Recogniser(nn.Module):
    """Convolutions over time, a bidirectional LSTM and CTC."""

    def __init__(self, bins: int, hidden: int, labels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(bins, hidden, 5, padding=2)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, labels)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(F.relu(self.convolution(features)).transpose(1, 2))
        spoken = self.classifier(outputs).log_softmax(dim=-1).transpose(0, 1)
        frames = torch.full((labels.shape[0],), spoken.shape[0], dtype=torch.long)
        counts = torch.full((labels.shape[0],), labels.shape[1], dtype=torch.long)
        return F.ctc_loss(spoken, labels, frames, counts)


def recogniser(*, batch_size: int = 16, bins: int = 40, hidden: int = 96) -> LengthWorkload:
    """Random features; a label for eight frames."""

    def batch(length: int) -> Batch:
        features = torch.randn(batch_size, bins, length, generator=batch_generator(length))
        return features, _words(length, 30, batch_size, length // 8)

    return LengthWorkload("speech", Recogniser(bins, hidden, 30), batch, _called, (32, 192), whole=True)


LENGTH_WORKLOADS: dict[str, Callable[..., LengthWorkload]] = {
    "tagger": tagger,
    "loop": translator,
    "seq2seq": coin_flips,
    "bert": bert,
    "llama": llama,
    "t5": t5,
    "speech": recogniser,
}
"""Factories by name. Three need the package transformers."""


def build_lengths(name: str, **sizes: Any) -> LengthWorkload:
    """The workload called `name`, with the same weights each time; the global generator is left as it was."""
    if name not in LENGTH_WORKLOADS:
        raise OptionError(
            f"no workload of many lengths is called {name!r}; known workloads: {listed(LENGTH_WORKLOADS)}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return LENGTH_WORKLOADS[name](**sizes)
