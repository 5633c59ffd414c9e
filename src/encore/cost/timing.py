"""Timing of calls from a microsecond to a second, with caches in the state in which a step leaves them.

**Caches.** A loop over one call has its operands, and PyTorch's own code, in the nearest cache: views and small
operators take two to four times as long in a step. So calls are timed one at a time, and before each a megabyte is
copied, untimed, as other operators of a step would: L1 and most of L2 are evicted, L3 is not. Two sets of operands
alternate, so that half of what just fits into L3 is new.

**The best run counts**, since all other work of the machine only adds to it. Runs in which the system preempted one of
our threads are no evidence (on a busy machine, one call of two threads may wait 8 ms for the second thread), so more
runs are made for them, within limits.

**Devices** are timed by their own events around each call. The copy before it evicts the last cache, and takes longer
than the host does to launch most calls: what is measured is the device, without the host that runs ahead of it in a
step. That a step whose host is slower than its device takes the host's time is not seen.
"""

from __future__ import annotations

import functools
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


def seconds_of(
    calls: Sequence[Callable[[], Any]],
    *,
    device: str = "cpu",
    refresh: Callable[[], Any] | None = None,
    most_seconds: float = MOST_SECONDS,
) -> float:
    """Seconds of one call. `calls` do the same on different operands, and alternate. If they write over their operands,
    `refresh` restores these, which is not timed."""
    if kind_of(device) != "cpu":
        return _device_seconds(calls, device, refresh, most_seconds)
    began = time.perf_counter()
    best = min(_run(call)[0] for call in (calls[0], calls[-1]))
    if best > LONG_SECONDS and best > most_seconds / FEW:
        return best
    best = math.inf  # that run found caches as the allocation of operands had left them
    flush = _flush(device)
    quiet = 0
    for made, call in enumerate(itertools.cycle(calls), 1):
        if refresh is not None:
            refresh()
        flush()
        found, disturbed = _run(call)
        best = min(best, found)
        quiet += not disturbed
        spent = time.perf_counter() - began
        if quiet == RUNS or (spent > most_seconds and quiet >= FEW) or (spent > most_seconds + PATIENCE and made > FEW):
            break
    return best


def _flush(device: str) -> Callable[[], Any]:
    """A copy that evicts what is in caches."""
    size = KINDS[kind_of(device)].flushed
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return functools.partial(target.copy_, source)


def _device_seconds(
    calls: Sequence[Callable[[], Any]], device: str, refresh: Callable[[], Any] | None, most_seconds: float
) -> float:
    flush = _flush(device)
    best, spent = math.inf, 0.0
    calls[-1]()  # the first call loads kernels
    for made, call in enumerate(itertools.cycle(calls), 1):
        if refresh is not None:
            refresh()
        synchronize(device)
        flush()
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        stream = torch.accelerator.current_stream(device)
        stream.record_event(first)
        call()
        stream.record_event(last)
        last.synchronize()
        seconds = first.elapsed_time(last) / 1000
        best, spent = min(best, seconds), spent + seconds
        if made == RUNS or (spent > most_seconds and made >= FEW):
            return best
    raise AssertionError("there is no call to time")


def _run(call: Callable[[], Any]) -> tuple[float, bool]:
    """Seconds of a call, and whether it was interrupted."""
    switches = _switches()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started, _switches() > switches


def _switches() -> int:
    """How often the system has preempted a thread of this process."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
