"""A decoder-only, pre-norm Transformer with dropout (Vaswani et al. 2017; Xiong et al. 2020).

It reads a tape of sums such as `07+85=092;` digit by digit: the signs are learnt at once, the result only by
attending to both summands. Attention is written in plain operations, so that scores, weights and dropout
masks, each quadratic in `steps`, are feature maps a planner can see.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from encore.workloads.workload import Batch, Workload, batch_generator

ALPHABET = "0123456789+=;"


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a position sees itself and those before it."""

    is_future: torch.Tensor

    def __init__(self, hidden: int, heads: int, steps: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.weight_dropout = nn.Dropout(dropout)
        is_future = torch.ones(steps, steps, dtype=torch.bool).triu(diagonal=1)
        self.register_buffer("is_future", is_future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        per_head = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, head, step, feature]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(self.is_future, float("-inf")).softmax(dim=-1)
        mixed = self.weight_dropout(weights) @ value
        output: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return output


class Block(nn.Module):
    """Attention and a perceptron, each normalised before, dropped out after, and added to its input."""

    def __init__(self, hidden: int, heads: int, steps: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(hidden), CausalAttention(hidden, heads, steps, dropout), nn.Dropout(dropout)
        )
        self.perceptron = nn.Sequential(
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.GELU(),
            nn.Linear(4 * hidden, hidden),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.perceptron(x)


class Transformer(nn.Module):
    """Predicts each token from all those before it, and returns the mean cross entropy in nats."""

    def __init__(self, hidden: int, layers: int, heads: int, steps: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), hidden)
        self.position = nn.Parameter(torch.empty(steps, hidden))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(hidden, heads, steps, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.projection = nn.Linear(hidden, len(ALPHABET))
        # Small embeddings, as in GPT-2: the residual stream starts quiet and every block is heard.
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens) + self.position)
        logits = self.projection(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def tape_of_sums(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Codes of `rows` tapes, each the first `length` characters of a run of sums like `07+85=092;`."""
    per_row = math.ceil(length / len("07+85=092;"))
    left, right = torch.randint(100, (2, rows, per_row), generator=generator).unbind(0)
    plus, equals, end = (torch.full_like(left, ALPHABET.index(sign)) for sign in "+=;")

    def digits(number: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [number // 10**power % 10 for power in reversed(range(count))]

    columns = [*digits(left, 2), plus, *digits(right, 2), equals, *digits(left + right, 3), end]
    return torch.stack(columns, dim=-1).flatten(1)[:, :length]


def workload(
    *,
    batch_size: int = 16,
    hidden: int = 256,
    layers: int = 6,
    heads: int = 8,
    steps: int = 128,
    dropout: float = 0.1,
) -> Workload:
    """Sequences of `steps` tokens; a batch is the tokens and, for each, the one that follows."""

    def batch(index: int) -> Batch:
        tape = tape_of_sums(batch_size, steps + 1, batch_generator(index))
        return tape[:, :-1].contiguous(), tape[:, 1:].contiguous()

    return Workload("transformer", Transformer(hidden, layers, heads, steps, dropout), batch)
