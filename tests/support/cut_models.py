"""Models that Dynamo cuts into several graphs."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH = 64, 24


@torch.compiler.disable
def opaque(module: nn.Module, args: Any) -> None:
    """A hook that Dynamo does not look into."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class HookedBlocks(nn.Module):
    """Equal blocks with an opaque hook before each, as sharded data parallelism puts there."""

    def __init__(self, blocks: int = 5, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        for block in self.blocks:
            block.register_forward_pre_hook(opaque)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Checking(nn.Module):
    """A layer behind assertions on its input. pytest does not rewrite them here."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max() < 10, "out of range"
        assert x.isfinite().all()
        return self.layer(x).sum()


class Attending(nn.Module):
    """One word of a translation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.score, self.vector = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(
        self, word: torch.Tensor, state: torch.Tensor, encoded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        repeated = state.unsqueeze(1).expand_as(encoded)
        scores = self.vector(torch.tanh(self.score(torch.cat((repeated, encoded), 2))))
        context = (scores.softmax(1) * encoded).sum(1)
        state = self.cell(torch.cat((self.embedding(word), context), 1), state)
        assert state.isfinite().all()
        return self.words(state), state


class CoinFlips(nn.Module):
    """A translator whose decoder is called in a loop, with teacher forcing by chance. The loss is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.decoder = Attending()

    def forward(self, source: torch.Tensor, target: torch.Tensor, forced: float = 0.5) -> torch.Tensor:
        written = torch.zeros(target.shape[1], target.shape[0], WORDS)
        encoded = self.encoder(self.embedding(source))
        state, word = encoded.mean(1), target[:, 0]
        for step in range(1, target.shape[1]):
            scores, state = self.decoder(word, state, encoded)
            written[step] = scores
            word = target[:, step] if random.random() < forced else scores.argmax(1)
        return written[1:]


def translate(model: nn.Module, source: torch.Tensor, target: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """One training step of `CoinFlips`."""
    random.seed(seed)
    torch.manual_seed(seed)
    written = model(source, target)
    loss = F.cross_entropy(written.reshape(-1, WORDS), target.t()[1:].reshape(-1))
    loss.backward()
    return loss.detach()
