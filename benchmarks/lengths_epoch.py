"""An epoch of a corpus whose batches have lengths of Zipf's law: Encore in half of eager's peak, and eager PyTorch.

Compile time counts. Encore begins with empty caches, and `largest=` has the sizes of the longest batch, so that the
budget is checked, and known, before the first step.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import encore
from benchmarks.lengths_compared import empty_caches
from benchmarks.workloads.corpus import Corpus, PaddedLanguageModel, zipf_corpus
from benchmarks.workloads.workload import Batch

SHARE = 0.5
"""Of eager's peak on the longest batch."""


@dataclass(frozen=True, slots=True)
class EpochSizes:
    """A corpus and a model."""

    texts: int = 9600
    batch_size: int = 64
    longest: int = 200
    hidden: int = 192
    layers: int = 2


QUICK = EpochSizes(texts=48, batch_size=4, longest=40, hidden=16, layers=1)


@dataclass(frozen=True, slots=True)
class EpochOutcome:
    """One epoch. Seconds are those of steps: forward, backward and the optimizer."""

    steps: int
    distinct: int
    """Different lengths."""
    eager_peak: int
    """Measured bytes of a step on the longest batch, resident ones included."""
    budget: int
    peak: int
    """Encore's measured peak on the longest batch, after the epoch."""
    eager_seconds: float
    seconds: float
    """Encore's, compile time included."""
    later: float
    """What a step takes whose length came before, over eager's step on the same batch: the median."""
    eager_loss: float
    """Of the last tenth of the epoch: the mean."""
    loss: float
    loss_difference: float
    """The largest relative difference between the losses of a step."""


def run_epoch(sizes: EpochSizes, advance: Callable[[str], None] = lambda note: None) -> EpochOutcome:
    """Train the same model twice on the same batches."""
    corpus = zipf_corpus(texts=sizes.texts, batch_size=sizes.batch_size, longest=sizes.longest)
    eager, planned = _model(sizes), _model(sizes)
    eager_peak = _peak(eager, corpus.longest)
    budget = int(SHARE * eager_peak)
    eager_losses, eager_seconds = _trained(eager, corpus, advance)
    with empty_caches():
        longest = tuple(corpus.longest[0].shape)
        encore.compile(planned, budget=budget, largest={"words": longest, "following": longest})
        losses, seconds = _trained(planned, corpus, advance)
        peak = _peak(planned, corpus.longest)
    seen, later = set[int](), list[float]()
    for batch, mine, its in zip(corpus.batches, seconds, eager_seconds, strict=True):
        if batch[0].shape[1] in seen and batch[0].shape[0] == sizes.batch_size:
            later.append(mine / its)
        seen.add(batch[0].shape[1])
    tail = max(1, len(losses) // 10)
    gc.collect()
    return EpochOutcome(
        steps=len(losses),
        distinct=corpus.lengths,
        eager_peak=eager_peak,
        budget=budget,
        peak=peak,
        eager_seconds=sum(eager_seconds),
        seconds=sum(seconds),
        later=statistics.median(later) if later else float("nan"),
        eager_loss=statistics.fmean(eager_losses[-tail:]),
        loss=statistics.fmean(losses[-tail:]),
        loss_difference=max(abs(one - two) / two for one, two in zip(losses, eager_losses, strict=True)),
    )


def _model(sizes: EpochSizes) -> PaddedLanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return PaddedLanguageModel(sizes.hidden, sizes.layers)


def _peak(model: PaddedLanguageModel, batch: Batch) -> int:
    """Bytes of a step on a batch, measured, with parameters, gradients of none, and the batch."""

    def step() -> None:
        model(*batch).backward()

    step()
    model.zero_grad()
    found = encore.measure(step)
    model.zero_grad()
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *batch))
    return held + found.step_peak


def _trained(
    model: PaddedLanguageModel, corpus: Corpus, advance: Callable[[str], None]
) -> tuple[list[float], list[float]]:
    """Train for an epoch by SGD; return the losses and seconds of the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, seconds = [], []
    for batch in corpus.batches:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
        advance(f"loss {losses[-1]:.3f}")
    return losses, seconds
