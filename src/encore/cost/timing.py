"""A stopwatch for calls of any length, from a microsecond to a second, that finds caches as a step would leave them.

**How warm are caches?** A loop over one call has its operands, and PyTorch's own code, in the nearest cache: views and
small operators take twice to four times as long in a step as they do there. So calls are timed one at a time, and off
the clock, before each, a megabyte is copied, as other operators of a step would: what was in L1 and most of L2 is
gone, L3 is as it was. Two sets of operands take turns, so that of what L3 might just hold, half is new.

**Which run counts?** The best one: whatever else the machine is doing only ever adds. Runs during which the system took
the processor away from one of our threads tell nothing (with a busy neighbour, one call of two threads may wait 8 ms
for the second thread), so more are made for them, within limits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

RUNS = 15
MOST_SECONDS = 0.03
"""Spent on one call; fewer runs are made to keep to it, as long as there are a few."""
FEW = 3
PATIENCE = 0.03
"""Spent beyond that on a call whose runs are disturbed."""
LONG_SECONDS = 0.05
"""Calls that take longer are run twice, and the better one counts: the first also made what PyTorch keeps."""
QUEUED_SECONDS = 5e-4
"""What is queued at a time on CUDA, where a single call would be timed with the wait for it."""
COPIED = 1 << 20
"""Bytes that are copied in between: with their copy, more than L2 holds."""


def seconds_of(
    calls: Sequence[Callable[[], Any]],
    *,
    cuda: bool = False,
    refresh: Callable[[], Any] | None = None,
    most_seconds: float = MOST_SECONDS,
) -> float:
    """Seconds of one call; `calls` do the same on different operands, and take turns. Where they spoil their operands,
    `refresh` makes these good, off the clock."""
    began = time.perf_counter()
    best = min(_run(call, 1, cuda)[0] for call in (calls[0], calls[-1]))
    if best > LONG_SECONDS and best > most_seconds / FEW:
        return best
    queued = max(1, round(QUEUED_SECONDS / best)) if cuda else 1
    best = math.inf  # the caches were as the last call, or the making of operands, had left them
    source, target = (torch.zeros(COPIED, dtype=torch.uint8) for _ in range(2))
    quiet = 0
    for made, call in enumerate(itertools.cycle(calls), 1):
        if refresh is not None:
            refresh()
        target.copy_(source)
        found, disturbed = _run(call, queued, cuda)
        best = min(best, found)
        quiet += not disturbed
        spent = time.perf_counter() - began
        if quiet == RUNS or (spent > most_seconds and quiet >= FEW) or (spent > most_seconds + PATIENCE and made > FEW):
            break
    return best


def _run(call: Callable[[], Any], times: int, cuda: bool) -> tuple[float, bool]:
    """Seconds a call, and was it disturbed?"""
    if cuda:
        torch.cuda.synchronize()
    switches = _switches()
    started = time.perf_counter()
    for _ in range(times):
        call()
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / times
    return seconds, _switches() > switches


def _switches() -> int:
    """How often the system has taken a processor from a thread of this process."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@contextmanager
def generators_kept(*, cuda: bool) -> Iterator[None]:
    """Whatever is drawn inside, the user's generators go on from where they were."""
    devices = range(torch.cuda.device_count()) if cuda else ()
    with torch.random.fork_rng(devices=devices):
        yield
