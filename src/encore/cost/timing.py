"""Timing of calls from a microsecond to a second, with caches in the state in which a step leaves them.

**Caches.** A loop over one call has its operands, and PyTorch's own code, in the nearest cache: views and small
operators take two to four times as long in a step. So calls are timed one at a time, and before each a megabyte is
copied, untimed, as other operators of a step would: L1 and most of L2 are evicted, L3 is not. Two sets of operands
alternate, so that half of what just fits into L3 is new.

**The best run counts**, since all other work of the machine only adds to it. Runs in which the system preempted one of
our threads are no evidence (on a busy machine, one call of two threads may wait 8 ms for the second thread), so more
runs are made for them, within limits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from encore.devices import KINDS, kind_of, synchronize

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

RUNS = 15
MOST_SECONDS = 0.03
"""Spent on one call; if runs take long there are fewer of them, but a few."""
FEW = 3
PATIENCE = 0.03
"""Spent beyond that on a call whose runs are interrupted."""
LONG_SECONDS = 0.05
"""Calls that take longer run twice, and the better run counts: the first also fills caches of PyTorch's."""
QUEUED_SECONDS = 5e-4
"""Work that is queued at a time on CUDA: a single call would be timed with its synchronization."""


def seconds_of(
    calls: Sequence[Callable[[], Any]],
    *,
    device: str = "cpu",
    refresh: Callable[[], Any] | None = None,
    most_seconds: float = MOST_SECONDS,
) -> float:
    """Seconds of one call. `calls` do the same on different operands, and alternate. If they write over their operands,
    `refresh` restores these, which is not timed."""
    began = time.perf_counter()
    best = min(_run(call, 1, device)[0] for call in (calls[0], calls[-1]))
    if best > LONG_SECONDS and best > most_seconds / FEW:
        return best
    queued = max(1, round(QUEUED_SECONDS / best)) if kind_of(device) != "cpu" else 1
    best = math.inf  # that run found caches as the allocation of operands had left them
    size = KINDS[kind_of(device)].flushed
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    quiet = 0
    for made, call in enumerate(itertools.cycle(calls), 1):
        if refresh is not None:
            refresh()
        target.copy_(source)
        found, disturbed = _run(call, queued, device)
        best = min(best, found)
        quiet += not disturbed
        spent = time.perf_counter() - began
        if quiet == RUNS or (spent > most_seconds and quiet >= FEW) or (spent > most_seconds + PATIENCE and made > FEW):
            break
    return best


def _run(call: Callable[[], Any], times: int, device: str) -> tuple[float, bool]:
    """Seconds a call, and whether it was interrupted."""
    synchronize(device)
    switches = _switches()
    started = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    seconds = (time.perf_counter() - started) / times
    return seconds, _switches() > switches


def _switches() -> int:
    """How often the system has preempted a thread of this process."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
