"""Additive attention: scores as one operator compared with the formula written out, forward and backward, interleaved.

What autograd saves is counted by storage, operands included: they are what the operator keeps. Written out, the
intermediate result of query, keys and scores has B x Tq x Tk x H numbers; the operator keeps nothing of that size.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from encore.compare.trainee import interleaved_times, median_ratio
from encore.cost.allocations import measure
from encore.rnn import reference

ROUNDS, QUICK_ROUNDS = 9, 3
SIZES = {
    "additive": (32, 50, 50, 256),
    "additive, LayerNorm": (32, 50, 50, 256),
    "additive, one step": (128, 1, 24, 256),
}
"""Batch, queries, keys, hidden: a whole sequence at once, and one step of a decoder."""
QUICK_SIZES = {name: (4, min(queries, 6), 8, 32) for name, (_, queries, _, _) in SIZES.items()}

Scores = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One kind of scores: bytes of the formula written out and of the operator, and the operator's time in terms of
    the other's."""

    name: str
    sizes: tuple[int, int, int, int]
    saved_eager: int
    saved: int
    peak_eager: int
    peak: int
    time_ratio: float
    """Median over rounds, forward and backward."""


def attention_rows(*, quick: bool = False) -> list[AttentionRow]:
    """Measure every kind."""
    sizes = QUICK_SIZES if quick else SIZES
    return [_row(name, sizes[name], QUICK_ROUNDS if quick else ROUNDS) for name in SIZES]


def _row(name: str, sizes: tuple[int, int, int, int], rounds: int) -> AttentionRow:
    batch, queries, keys, hidden = sizes
    norm = "LayerNorm" in name
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    operands = [some(batch, queries, hidden), some(batch, keys, hidden), some(hidden), None]
    operands += [some(hidden), some(hidden)] if norm else [None, None]
    eps, grad = (1e-5 if norm else None), torch.randn(batch, queries, keys, generator=generator)

    def written_out(*given: Tensor | None) -> Tensor:
        return reference.additive_scores(eps, *given)[0]  # type: ignore[arg-type]

    def operator(*given: Tensor | None) -> Tensor:
        return torch.ops.encore.additive_scores(*given, eps)

    ways: dict[str, Scores] = {"eager": written_out, "encore": operator}
    wanted = [one for one in operands if one is not None]

    def step(scores: Scores) -> None:
        torch.autograd.grad(scores(*operands), wanted, grad)

    saved, peaks = {}, {}
    for way, scores in ways.items():
        with _saved_bytes() as kept:
            found = scores(*operands)
        saved[way] = sum(kept.values())
        del found
        peaks[way] = measure(functools.partial(step, scores)).step_peak

    def timed(scores: Scores) -> float:
        started = time.perf_counter()
        step(scores)
        return time.perf_counter() - started

    times = interleaved_times({way: functools.partial(timed, scores) for way, scores in ways.items()}, rounds)
    ratio = median_ratio(times["encore"], times["eager"])
    return AttentionRow(name, sizes, saved["eager"], saved["encore"], peaks["eager"], peaks["encore"], ratio)


@contextmanager
def _saved_bytes() -> Iterator[dict[int, int]]:
    """Storages that autograd saves inside, by address."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept
