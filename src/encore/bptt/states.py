"""The states that a schedule stores: in memory, or in tiers along with the inputs of an iterator."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from encore.bptt.actions import Level
from encore.bptt.snapshot import Held, Surroundings, SurroundingState
from encore.bptt.source import Once, Source
from encore.tiers import Parcel, Tier


class States:
    """Carries by the step that they go into, each with the random state and the buffers of that time."""

    def __init__(self, surroundings: Surroundings, source: Source, tiers: Sequence[Tier]) -> None:
        self.surroundings = surroundings
        self.tiers = tiers
        self.base = surroundings.read()
        """The surroundings when the loop began: what is as it was then is shared."""
        self._once = source if isinstance(source, Once) else None
        self._last_stored = 0
        self._memory: dict[int, tuple[Held, SurroundingState]] = {}
        self._parcels: dict[int, tuple[Parcel, tuple[bool, ...]]] = {}
        self._inputs: dict[int, tuple[Parcel, list[Any]]] = {} if self._once is None else self._once.parcels
        self._finalizer = weakref.finalize(self, _abandon, self._parcels, self._inputs)
        self._finalizer.atexit = False

    def store(self, step: int, level: Level, carry: Sequence[Tensor]) -> Parcel | None:
        """Store a carry, in memory or as a parcel of a tier."""
        around = self.surroundings.read(self.base)
        if level == "memory":
            self._memory[step] = Held(carry), around
            return None
        if self._once is not None and step:
            self._once.offload(self._last_stored, step, self._put)
        self._last_stored = step
        parcel = self._put([*carry, *around.changes()])
        self._parcels[step] = parcel, around.changed
        return parcel

    def _put(self, tensors: list[Tensor]) -> Parcel:
        """Into the nearest tier that has room; the last one raises if none has."""
        size = sum(tensor.nbytes for tensor in tensors)
        tier = next((tier for tier in self.tiers[:-1] if tier.has_room(size)), self.tiers[-1])
        return tier.store(tensors)

    def prefetch(self, step: int) -> None:
        parcel, _ = self._parcels[step]
        parcel.tier.prefetch(parcel)
        if self._once is not None:
            self._once.prefetch(step)

    def load(self, step: int, level: Level, count: int) -> tuple[list[Tensor], SurroundingState, Parcel | None]:
        """The `count` tensors of a carry, and the surroundings it was stored with."""
        if level == "memory":
            held, around = self._memory[step]
            return held.tensors(), around, None
        parcel, changed = self._parcels[step]
        tensors = parcel.tier.load(parcel)
        if self._once is not None:
            self._once.reload(step)
        return tensors[:count], self.base.with_changes(changed, tensors[count:]), parcel

    def free(self, step: int, level: Level) -> Parcel | None:
        if level == "memory":
            del self._memory[step]
            return None
        parcel, _ = self._parcels.pop(step)
        parcel.tier.free(parcel)
        if self._once is not None:
            self._once.reload(step)
        return parcel

    def close(self) -> None:
        """Free everything."""
        self._memory.clear()
        for parcels in (self._parcels, self._inputs):
            for parcel, _ in parcels.values():
                parcel.tier.free(parcel)
            parcels.clear()


def _abandon(*held: dict[int, tuple[Parcel, Any]]) -> None:
    """Abandon parcels of a scan that was never reversed. The collector calls this, perhaps during a call of a tier."""
    for parcels in held:
        for parcel, _ in parcels.values():
            parcel.tier.abandon(parcel)
        parcels.clear()
