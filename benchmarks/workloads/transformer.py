"""A decoder-only, pre-norm Transformer with dropout (Vaswani et al. 2017; Xiong et al. 2020).

It reads a tape of sums such as `07+85=092;` digit by digit, and is scored on sums that no tape it was trained on
had. Attention is written in plain operations, so that scores, weights and dropout masks, each quadratic in `steps`,
are feature maps a planner can see.
"""

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.data.sums import ALPHABET, RESULT, SUM, tape_of_sums
from benchmarks.workloads.metrics import perplexity
from benchmarks.workloads.workload import Batch, Workload, batch_generator, evaluating, held_out_generator
from encore.errors import OptionError

HELD_OUT_ROWS = 64


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
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), following.flatten())

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What may follow each of the `tokens` `[row, step]`: `[row, step, token]`."""
        x = self.dropout(self.embedding(tokens) + self.position)
        logits: torch.Tensor = self.projection(self.norm(self.blocks(x)))
        return logits

    def complete(self, tape: torch.Tensor, positions: range) -> torch.Tensor:
        """The `tape` `[row, step]` with the tokens at `positions` written by the model, the likeliest each time.

        What stands behind a position cannot be seen from it, so the tape keeps its length.
        """
        tape = tape.clone()
        for position in positions:
            tape[:, position] = self.logits(tape)[:, position - 1].argmax(dim=-1)
        return tape


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
    if hidden % heads:
        raise OptionError(f"hidden={hidden} cannot be shared out among heads={heads}: take a multiple of it")

    def rows(count: int, generator: torch.Generator, *, held_out: bool) -> Batch:
        tape = tape_of_sums(count, steps + 1, generator, held_out=held_out)
        return tape[:, :-1].contiguous(), tape[:, 1:].contiguous()

    @functools.cache
    def held_out() -> Batch:
        return rows(HELD_OUT_ROWS, held_out_generator(), held_out=True)

    def score(model: nn.Module) -> dict[str, float]:
        read, following = held_out()
        with evaluating(model) as network:
            logits = network.logits(read)
        found = {"perplexity": perplexity(logits, following)}
        if sums := whole_sums(steps + 1):
            # Digits are written one after another: a result comes out right if each digit is the likeliest one
            # after the true ones before it.
            is_right = (logits.argmax(dim=-1) == following)[:, RESULT.start - 1 :]
            by_sum = [
                is_right[:, at : at + RESULT.stop - RESULT.start].all(dim=1)
                for at in range(0, sums * len(SUM), len(SUM))
            ]
            found["exact match"] = torch.stack(by_sum).float().mean().item()
        return found

    def sample(model: nn.Module) -> str:
        tapes, start = held_out()[0][:3], (whole_sums(steps) - 1) * len(SUM)
        with evaluating(model) as network:
            written = network.complete(tapes, range(start + RESULT.start, start + RESULT.stop))
        lines = []
        for have, want in zip(written.tolist(), tapes.tolist(), strict=True):
            have, want = (
                "".join(ALPHABET[code] for code in tape[start : start + RESULT.stop]) for tape in (have, want)
            )
            lines.append(have if have == want else f"{have} (wrong: {want})")
        return "\n".join(lines)

    def batch(index: int) -> Batch:
        return rows(batch_size, batch_generator(index), held_out=False)

    model = Transformer(hidden, layers, heads, steps, dropout)
    return Workload("transformer", model, batch, score, 1e-3, sample if whole_sums(steps) else None)


def whole_sums(length: int) -> int:
    """How many sums of a tape of `length` characters have their whole result on it."""
    return (length + len(SUM) - RESULT.stop) // len(SUM)
