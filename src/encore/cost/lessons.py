"""The speed of a tier, measured on running steps.

The measurement before the first step (`links.py`) overlaps transfers with matrix products alone. A step has other
operators, another state of caches and another use of threads, so both speeds are measured again in the step itself. The
first steps of a plan that offloads activations are timed: how long the tier's own thread takes for their bytes, and how
much longer computing takes than its operators alone. The results replace the earlier measurement in later plans.
"""

from __future__ import annotations

import statistics
import time

from encore.cost.links import SLOWEST, keep_link
from encore.fates import Link
from encore.tiers import Tier

STEPS = 3
"""Steps that are timed, after the first, which creates the file and warms up."""
LEAST_MOVED = 4 << 20
"""Bytes that a step must move to be measured."""


class LinkLessons:
    """Times the steps of one plan. `computing` is the sum of the seconds of its operators."""

    def __init__(self, tier: Tier, known: Link, computing: float) -> None:
        self.tier = tier
        self.known = known
        self.computing = computing
        self._steps = -1
        self._seen: list[tuple[float, float, float]] = []
        self._spent: float | None = None
        self._before = tier.transfers.copy()

    @property
    def over(self) -> bool:
        return self._steps >= STEPS

    def begin_step(self) -> None:
        """Begin a forward. A step whose backward does not run is not measured."""
        self._before = self.tier.transfers.copy()
        self._spent = 0.0

    def ran(self, began: float) -> None:
        """Record that forward or backward has ended, which began at this time."""
        if self._spent is not None:
            self._spent += time.perf_counter() - began

    def end_step(self) -> None:
        """Record that backward has ended."""
        if self._spent is None:
            return
        self._steps += 1
        if self._steps > 0:
            self._note(self._spent)
        self._spent = None
        if self.over and self._seen:
            store, load, pace = (statistics.median(figures) for figures in zip(*self._seen, strict=True))
            keep_link(self.tier, Link(store, load, self.known.call, pace, self.known.depth))

    def _note(self, spent: float) -> None:
        now, before = self.tier.transfers, self._before
        out, back = now.bytes_stored - before.bytes_stored, now.bytes_loaded - before.bytes_loaded
        if min(out, back) < LEAST_MOVED:
            return
        stored, loaded = now.store_seconds - before.store_seconds, now.load_seconds - before.load_seconds
        stalled = now.waited_seconds - before.waited_seconds
        calls = (now.stores - before.stores) * self.known.call, (now.loads - before.loads) * self.known.call
        rates = [
            max(seconds / 2, seconds - call) / size
            for seconds, call, size in zip((stored, loaded), calls, (out, back), strict=True)
        ]
        lost, shared = spent - stalled - self.computing, max(stored + loaded - stalled, 1e-6)
        self._seen.append((rates[0], rates[1], min(1.0, max(SLOWEST, 1 - lost / shared))))
