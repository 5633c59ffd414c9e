"""Models that end in a head: those that can be computed in slices of rows, and those that cannot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

aten = torch.ops.aten
WORDS, WIDTH, BATCH, STEPS = 23, 6, 4, 5


class Net(nn.Module):
    """A hidden layer and whatever loss it is given to end in."""

    rarity: torch.Tensor

    def __init__(self, end: Callable[[Net, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, WORDS)
        self.turned = nn.Parameter(torch.randn(WIDTH, WORDS))
        self.register_buffer("rarity", torch.rand(WORDS) + 0.5)
        self.end = end

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        return self.end(self, torch.tanh(self.enter(x)), target)


class Tied(nn.Module):
    """The words are read with the matrix that they are predicted with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(torch.tanh(self.mix(self.embedding(words))), 0.2)
        return F.cross_entropy(F.linear(hidden, self.embedding.weight).flatten(0, 1), target.flatten())


def entropy(logits: torch.Tensor, target: torch.Tensor, **how: Any) -> torch.Tensor:
    """Of scores with any number of dimensions, words last."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **how)


def entropy_of_shares(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Against a distribution over words, not a word."""
    return F.cross_entropy(logits.flatten(0, -2), F.one_hot(target.flatten(), WORDS).to(logits.dtype))


FORMS: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], Any]] = {
    "bias": lambda net, h, t: entropy(net.leave(h), t),
    "no bias": lambda net, h, t: entropy(F.linear(h, net.leave.weight), t),
    "weight stored the other way": lambda net, h, t: entropy(h @ net.turned, t),
    "rows first": lambda net, h, t: entropy(net.leave(h.flatten(0, 1)), t),
    "time first": lambda net, h, t: entropy(net.leave(h.transpose(0, 1)), t.t()),
    "log softmax of its own": lambda net, h, t: F.nll_loss(net.leave(h).log_softmax(-1).flatten(0, 1), t.flatten()),
    "no softmax": lambda net, h, t: F.nll_loss(net.leave(h).flatten(0, 1), t.flatten()),
    "a wider type": lambda net, h, t: entropy(net.leave(h).double(), t),
    "scaled": lambda net, h, t: entropy(net.leave(h) / 0.7 + net.rarity, t),
    "soft cap": lambda net, h, t: entropy(3 * torch.tanh(net.leave(h) / 3), t),
    "dropout before": lambda net, h, t: entropy(net.leave(F.dropout(h, 0.3)), t),
    "a loss that goes on": lambda net, h, t: entropy(net.leave(h), t).square() * h.mean().exp(),
    "frozen weight": lambda net, h, t: entropy(F.linear(h, net.leave.weight.detach(), net.leave.bias.detach()), t),
    "frozen rows": lambda net, h, t: entropy(net.leave(h.detach()), t),
    "frozen head": lambda net, h, t: entropy(net.leave(h).detach(), t) * h.sum(),
    "two heads": lambda net, h, t: entropy(net.leave(h), t) + entropy(h @ net.turned, t.flip(0), reduction="sum"),
    "two losses of one weight": lambda net, h, t: entropy(net.leave(h), t) + entropy(net.leave(h * h), t),
}  # fmt: skip


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, STEPS, WIDTH, requires_grad=True), torch.randint(WORDS, (BATCH, STEPS))


def and_also(more: Callable[[torch.Tensor], Any]) -> Callable[[Net, torch.Tensor, torch.Tensor], Any]:
    """A head whose scores somebody else wants, too."""

    def end(net: Net, hidden: torch.Tensor, target: torch.Tensor) -> Any:
        scores = net.leave(hidden)
        return entropy(scores, target), more(scores)

    return end


def shifted(target: torch.Tensor) -> torch.Tensor:
    """Each position is to predict the next word, as Hugging Face's losses have it; the last one predicts none."""
    return F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()


def causal(net: Net, hidden: torch.Tensor, target: torch.Tensor, items: Any = None) -> Any:
    """The loss of Hugging Face's causal language models, which return their scores."""
    scores = F.linear(hidden, net.leave.weight)
    upcast = scores.double()
    how = "mean" if items is None else "sum"
    loss = F.cross_entropy(upcast.view(-1, WORDS), shifted(target).view(-1), ignore_index=-100, reduction=how)
    return (loss if items is None else loss / items), scores


RETURNED: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], Any]] = {
    "causal": causal,
    "causal, a number of items": lambda net, h, t: causal(net, h, t, torch.tensor(17)),
    "masked": and_also(lambda scores: scores),
    "rows of them": lambda net, h, t: (lambda s: (entropy(s, t), s))(net.leave(h.flatten(0, 1))),
    "in a wider type": lambda net, h, t: (lambda s: (entropy(s, t), s))(net.leave(h).double()),
    "soft cap": lambda net, h, t: (lambda s: (entropy(3 * torch.tanh(s / 3), t), s))(net.leave(h)),
    "capped ones": lambda net, h, t: (lambda s: (entropy(s, t), s))(3 * torch.tanh(net.leave(h) / 3)),
    "log-probabilities": lambda net, h, t: (
        lambda log: (F.nll_loss(log.flatten(0, 1), t.flatten()), log)
    )(net.leave(h).log_softmax(-1)),
    "scores and log-probabilities": lambda net, h, t: (
        lambda s: (lambda log: (F.nll_loss(log.flatten(0, 1), t.flatten()), s, log))(s.log_softmax(-1))
    )(net.leave(h)),
}  # fmt: skip
"""Heads whose scores are returned and receive no gradient."""


DECLINED: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], Any]] = {
    "label smoothing": lambda net, h, t: entropy(net.leave(h), t, label_smoothing=0.1),
    "scores are returned": and_also(lambda scores: scores),
    "a view of them is returned": and_also(lambda scores: scores[0]),
    "predictions are counted": and_also(lambda scores: scores.argmax(-1)),
    "scores are kept small": and_also(lambda scores: scores.logsumexp(-1).square().mean()),
    "log-probabilities are returned": lambda net, h, t: (
        lambda log: (F.nll_loss(log.flatten(0, 1), t.flatten()), log)
    )(net.leave(h).log_softmax(-1)),
    "words are not last": lambda net, h, t: F.cross_entropy(net.leave(h).transpose(1, 2), t),
    "dropout after": lambda net, h, t: entropy(F.dropout(net.leave(h), 0.2), t),
    "rows differ": lambda net, h, t: entropy(net.leave(h) * h.mean(-1, keepdim=True), t),
    "rows see each other": lambda net, h, t: entropy(net.leave(h) - net.leave(h).mean(0), t),
    "softmax along rows": lambda net, h, t: F.nll_loss(net.leave(h).flatten(0, 1).log_softmax(0), t.flatten()),
    "a bias for each row": lambda net, h, t: F.cross_entropy(
        torch.addmm(h.flatten(0, 1) @ net.turned.detach(), h.flatten(0, 1), net.turned), t.flatten()
    ),
    "two losses of the same scores": lambda net, h, t: (lambda s: entropy(s, t) + entropy(s, t.flip(0)))(net.leave(h)),
    "a batched product": lambda net, h, t: entropy(h @ net.turned.expand(BATCH, -1, -1), t),
    "soft targets": lambda net, h, t: entropy_of_shares(net.leave(h), t),
    "the total weight is read": lambda net, h, t: math.prod(
        aten.nll_loss_forward(net.leave(h).log_softmax(-1).flatten(0, 1), t.flatten(), None, 1, -100)
    ),
    "no loss": lambda net, h, t: net.leave(h).square().mean(),
}  # fmt: skip
