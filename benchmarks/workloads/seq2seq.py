"""Sequence to sequence with attention, in the style of tutorials (Sutskever et al. 2014; Bahdanau et al. 2015).

A bidirectional GRU reads the source; a GRU cell with attention writes one word a call, in a loop that flips a coin
at every word: the next input is the reference (teacher forcing) or the word just written. The decoder checks its
tensors with `assert`, scores are collected in a preallocated tensor, the loss is computed outside of the model, and
every batch is as long as its longest sentence. No compiler captures such a step as one graph.
"""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.data.parallel import TASKS
from benchmarks.workloads.data.vocabulary import BEGIN, END, PAD
from benchmarks.workloads.workload import Batch, CutWorkload, batch_generator


class Encoder(nn.Module):
    """What is said at every position of the source, and the state in which the decoder begins."""

    def __init__(self, words: int, embedded: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedded, padding_idx=PAD)
        self.rnn = nn.GRU(embedded, hidden, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, hidden = self.rnn(self.dropout(self.embedding(source)))
        return outputs, torch.tanh(self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1)))


class Attention(nn.Module):
    """Weights of the source positions: a perceptron on the state and each position."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attn = nn.Linear(3 * hidden, hidden)
        self.v = nn.Linear(hidden, 1, bias=False)

    def forward(self, hidden: torch.Tensor, encoded: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        repeated = hidden.unsqueeze(0).repeat(encoded.shape[0], 1, 1)
        energy = torch.tanh(self.attn(torch.cat((repeated, encoded), dim=2)))
        scores = self.v(energy).squeeze(2).masked_fill(is_padding, float("-inf"))
        return F.softmax(scores, dim=0)


class Decoder(nn.Module):
    """One word of the translation."""

    def __init__(self, words: int, embedded: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden)
        self.embedding = nn.Embedding(words, embedded, padding_idx=PAD)
        self.rnn = nn.GRU(embedded + 2 * hidden, hidden)
        self.fc_out = nn.Linear(embedded + 3 * hidden, words)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, word: torch.Tensor, hidden: torch.Tensor, encoded: torch.Tensor, is_padding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.dropout(self.embedding(word))
        weights = self.attention(hidden, encoded, is_padding)
        context = torch.bmm(weights.t().unsqueeze(1), encoded.transpose(0, 1)).squeeze(1)
        output, state = self.rnn(torch.cat((embedded, context), dim=1).unsqueeze(0), hidden.unsqueeze(0))
        assert (output == state).all(), "one step of one layer: its output is its state"
        output = output.squeeze(0)
        return self.fc_out(torch.cat((output, context, embedded), dim=1)), state.squeeze(0)


class Seq2Seq(nn.Module):
    """The scores of every word of the translation but the first, which is `BEGIN`: `[step, sentence, word]`."""

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, source: torch.Tensor, target: torch.Tensor, teacher_forcing_ratio: float = 0.5) -> torch.Tensor:
        encoded, hidden = self.encoder(source)
        is_padding = source == PAD
        outputs = encoded.new_zeros(len(target), target.shape[1], self.decoder.fc_out.out_features)
        word = target[0]
        for step in range(1, len(target)):
            output, hidden = self.decoder(word, hidden, encoded, is_padding)
            outputs[step] = output
            teacher_force = random.random() < teacher_forcing_ratio
            word = target[step] if teacher_force else output.argmax(1)
        return outputs


def forward(model: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One step of training, up to its loss: the same coins and masks for the same batch."""
    seed = int(source.sum())
    random.seed(seed)
    torch.manual_seed(seed)
    outputs = model(source, target)
    return F.cross_entropy(outputs[1:].flatten(0, 1), target[1:].flatten(), ignore_index=PAD)


def workload(
    *, batch_size: int = 32, hidden: int = 128, embedded: int = 64, steps: int = 48, dropout: float = 0.3
) -> CutWorkload:
    """Numbers of at most `steps` words, from English to German; a batch is source and target, time first."""
    text = TASKS["numbers"](steps)

    def batch(index: int) -> Batch:
        generator = batch_generator(index)
        pool = sorted((text.pair(generator, False) for _ in range(4 * batch_size)), key=lambda pair: len(pair[1]))
        first = int(torch.randint(3 * batch_size + 1, (), generator=generator))
        pairs = pool[first : first + batch_size]  # sentences of similar lengths, to pad little
        source = [torch.tensor(text.source.encode(words)) for words, _ in pairs]
        target = [torch.tensor([BEGIN, *text.target.encode(words), END]) for _, words in pairs]
        pad = nn.utils.rnn.pad_sequence
        return pad(source, padding_value=PAD), pad(target, padding_value=PAD)

    sizes = (embedded, hidden, dropout)
    model = Seq2Seq(Encoder(len(text.source), *sizes), Decoder(len(text.target), *sizes))
    return CutWorkload("seq2seq", model, batch, forward, ("Decoder",))
