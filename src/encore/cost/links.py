"""The speed of transfers to and from a tier, while a step computes.

A transfer runs on a thread that packs, computes checksums and writes, and so slows down the threads that compute, as
they slow down the transfer. So both are measured together: large parcels are stored and loaded while matrices are
multiplied, and the slowdown of the products is the cost of a transfer that nothing waits for. It is measured once for
every folder and cached, until running steps give a better measurement (`lessons.py`). If nothing may run and nothing is
cached, the constants below are used: those of an average solid-state disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from encore.cost.rates import is_duration
from encore.cost.timing import seconds_of
from encore.cost.torch_private import profiler_is_running
from encore.devices import is_here, synchronize
from encore.fates import Link
from encore.measurements import machine_cache
from encore.tiers import Parcel, Tier

DISK_BYTES_A_SECOND = 5e8
CALL_SECONDS = 2e-4
PACE = 0.9
DEPTH = 64

PARCEL = 8 << 20
PARCELS = 8
"""The number of such parcels that are stored and loaded at a time."""
SMALL = 16
"""The number of tiny parcels, whose time is that of the call."""
ROUNDS = 6
"""The first one also creates the file and is not counted; the best of the others is."""
SIDE = 384
"""Rows and columns of the matrices that are multiplied during transfers."""
SLOWEST = 0.05
"""The least measured pace that is believed; below it, the machine was busy with other work."""
FIGURES = ("store", "load", "call", "pace")


def assumed_link() -> Link:
    """The speed that is assumed if nothing was measured."""
    return Link(1 / DISK_BYTES_A_SECOND, 1 / DISK_BYTES_A_SECOND, CALL_SECONDS, PACE, DEPTH)


def known_link(name: str, place: str, depth: int = DEPTH) -> Link | None:
    """The cached speed, if it was measured before."""
    cache = machine_cache()
    known = {figure: cache.get(_key(name, place, figure)) for figure in FIGURES}
    figures = {figure: number for figure, number in known.items() if number is not None and is_duration(number)}
    return Link(depth=depth, **figures) if len(figures) == len(FIGURES) else None


def link_to(tier: Tier) -> Link:
    """Return the speed of a tier, measured before or now."""
    known = known_link(tier.name, tier.place, tier.depth)
    if known is not None or profiler_is_running():
        return known or assumed_link()
    found = measure_link(tier)
    keep_link(tier, found)
    return found


def keep_link(tier: Tier, found: Link) -> None:
    """Cache the measured speed of a tier."""
    cache = machine_cache()
    for figure in FIGURES:
        cache.put(_key(tier.name, tier.place, figure), getattr(found, figure))
    cache.save()


def _key(name: str, place: str, figure: str) -> str:
    return f"seconds link {name} {place} {figure} threads={torch.get_num_threads()}"


def measure_link(tier: Tier) -> Link:
    """Measure storing and loading parcels while matrices are multiplied."""
    device = "cuda" if tier.name == "host" and is_here("cuda") else "cpu"
    large = [torch.zeros(PARCEL, dtype=torch.uint8, device=device) for _ in range(min(PARCELS, tier.depth))]
    small = [torch.zeros(1, dtype=torch.uint8, device=device) for _ in range(min(SMALL, tier.depth))]
    left, right = (torch.full((SIDE, SIDE), 0.01, device=device) for _ in range(2))

    def compute() -> None:
        torch.mm(left, right)

    with torch.no_grad():
        alone = seconds_of([compute], device=device)
        rounds = [_round_trip(tier, large, compute) for _ in range(ROUNDS)]
        calls = [_round_trip(tier, small, None) for _ in range(ROUNDS)]
    size = PARCEL * len(large)
    out, back = min(there for there, _, _ in rounds[1:]), min(again for _, again, _ in rounds[1:])
    pace = max(done * alone / (there + again) for there, again, done in rounds[1:])
    call = min(there + again for there, again, _ in calls) / 2 / len(small)
    store, load = (max(seconds / 2, seconds - len(large) * call) / size for seconds in (out, back))
    return Link(store, load, call, min(1.0, max(SLOWEST, pace)), tier.depth)


def _round_trip(
    tier: Tier, tensors: list[torch.Tensor], compute: Callable[[], None] | None
) -> tuple[float, float, int]:
    """Seconds of storing and of loading, and how many calls of `compute` ran meanwhile."""
    parcels: list[Parcel] = []
    tier.claim([tensor.nbytes for tensor in tensors])
    try:
        started = time.perf_counter()
        parcels += (tier.store([tensor]) for tensor in tensors)
        done = _compute_during(tier, compute)
        tier.wait()
        synchronize()
        out = time.perf_counter() - started
        started = time.perf_counter()
        for parcel in parcels:
            tier.prefetch(parcel)
        done += _compute_during(tier, compute)
        for parcel in parcels:
            tier.load(parcel)
        synchronize()
        back = time.perf_counter() - started
    finally:
        for parcel in parcels:
            tier.free(parcel)
    return out, back, done


def _compute_during(tier: Tier, compute: Callable[[], None] | None) -> int:
    """Call `compute` while a tier is busy; return how often."""
    done = 0
    while compute is not None and tier.busy:
        compute()
        done += 1
    return done
