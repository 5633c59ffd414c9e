"""Estimates of a workload by batch size: batches are shapes, and no step runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.workloads import Batch
from encore.api import estimate_with
from encore.compiler.estimate import Estimate
from encore.errors import OptionError
from encore.options import make_options, optimizer_bytes
from examples.train.settings import Settings

LOOKED_AT = (2, 3, 5)
"""Batch sizes whose real batches tell how shapes grow."""


class Estimates:
    """Estimates of one workload by batch size, each made once; the optimizer's state is counted in."""

    def __init__(self, settings: Settings, tell: Callable[[str], None] = lambda note: None) -> None:
        workload = settings.build(batch_size=1)
        self.model = workload.model
        self.beside = optimizer_bytes(torch.optim.Adam(self.model.parameters()))
        self.options = make_options({"tiers": settings.compile_options["tiers"]})
        self.tell = tell
        self._batch = batch_shapes(settings)
        self._made: dict[int, Estimate] = {}
        self._floors: dict[int, int] = {}

    def at(self, batch_size: int) -> Estimate:
        if batch_size not in self._made:
            self.tell(f"estimate of a batch of {batch_size}")
            estimate = estimate_with(self.options, self.model, self._batch(batch_size), {})
            self._made[batch_size] = estimate.beside(resident=self.beside)
        return self._made[batch_size]

    def floor(self, batch_size: int) -> int:
        """The least that a step takes through Encore, resident bytes included."""
        if batch_size not in self._floors:
            self._floors[batch_size] = self.at(batch_size).floor
        return self._floors[batch_size]

    def resident(self, batch_size: int) -> int:
        return self.at(batch_size).resident

    def unplanned(self, batch_size: int) -> int:
        """The peak of a step that keeps everything, above what is resident."""
        return self.at(batch_size).unplanned.step_peak


def batch_shapes(settings: Settings) -> Callable[[int], Batch]:
    """Batches of any size, without memory: every dimension grows with the batch size as it does in small ones."""
    batches = [settings.build(batch_size=size).batch(0) for size in LOOKED_AT]
    small, next_to_it, larger = LOOKED_AT

    def shape(position: int, batch_size: int) -> tuple[int, ...]:
        first, second = (batch[position].shape for batch in batches[:2])
        steps = (batch_size - small) // (next_to_it - small)
        return tuple(one + steps * (other - one) for one, other in zip(first, second, strict=True))

    for position, tensor in enumerate(batches[2]):
        if shape(position, larger) != tuple(tensor.shape):
            raise OptionError(
                f"the shapes of {settings.workload}'s batches do not follow from the batch size "
                f"({list(tensor.shape)} at {larger}); try sizes with --batch-size instead"
            )

    def batch(batch_size: int) -> Batch:
        return tuple(
            torch.empty(shape(position, batch_size), dtype=tensor.dtype, device="meta")
            for position, tensor in enumerate(batches[0])
        )

    return batch
