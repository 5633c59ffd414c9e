"""How fast the way to a tier is, beside a step that computes.

A transfer runs on a thread that packs, sums up and writes, and so takes time from those that compute, as they do from
it. So both are measured together: large parcels go out and come back while matrices are multiplied, and the pace of the
products says what a transfer costs even where nobody waits for it. Measured once for every folder and kept on disk,
until steps that move feature maps show more (`lessons.py`). Where nothing may run and nothing is on disk, the
constants below stand in: they are those of a middling solid-state disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from encore.cost.rates import is_duration
from encore.cost.timing import seconds_of
from encore.cost.torch_private import profiler_is_running
from encore.measurements import machine_cache
from encore.schedule import Link
from encore.tiers import Parcel, Tier

DISK_BYTES_A_SECOND = 5e8
CALL_SECONDS = 2e-4
PACE = 0.9
DEPTH = 64

PARCEL = 8 << 20
PARCELS = 8
"""Of that size go out and come back at a time."""
SMALL = 16
"""Parcels of a page whose time is that of the call."""
ROUNDS = 6
"""The first one also makes the file, and does not count; of the others, the best does."""
SIDE = 384
"""Rows and columns of the matrices that are multiplied meanwhile."""
SLOWEST = 0.05
"""Of any pace that was measured: something must be moving, or the machine was busy with other things."""
FIGURES = ("store", "load", "call", "pace")


def assumed_link() -> Link:
    """What is taken for granted where nothing was measured."""
    return Link(1 / DISK_BYTES_A_SECOND, 1 / DISK_BYTES_A_SECOND, CALL_SECONDS, PACE, DEPTH)


def known_link(name: str, place: str, depth: int = DEPTH) -> Link | None:
    """What was measured before."""
    cache = machine_cache()
    known = {figure: cache.get(_key(name, place, figure)) for figure in FIGURES}
    figures = {figure: number for figure, number in known.items() if number is not None and is_duration(number)}
    return Link(depth=depth, **figures) if len(figures) == len(FIGURES) else None


def link_to(tier: Tier) -> Link:
    """The way to a tier: measured before, or now."""
    known = known_link(tier.name, tier.place, tier.depth)
    if known is not None or profiler_is_running():
        return known or assumed_link()
    found = measure_link(tier)
    keep_link(tier, found)
    return found


def keep_link(tier: Tier, found: Link) -> None:
    """Write down what was found of the way to a tier, for everybody who asks from now on."""
    cache = machine_cache()
    for figure in FIGURES:
        cache.put(_key(tier.name, tier.place, figure), getattr(found, figure))
    cache.save()


def _key(name: str, place: str, figure: str) -> str:
    return f"seconds link {name} {place} {figure} threads={torch.get_num_threads()}"


def measure_link(tier: Tier) -> Link:
    """Send parcels out and back, and compute meanwhile."""
    device = "cuda" if tier.name == "host" and torch.cuda.is_available() else "cpu"
    large = [torch.zeros(PARCEL, dtype=torch.uint8, device=device) for _ in range(min(PARCELS, tier.depth))]
    small = [torch.zeros(1, dtype=torch.uint8, device=device) for _ in range(min(SMALL, tier.depth))]
    left, right = (torch.full((SIDE, SIDE), 0.01, device=device) for _ in range(2))

    def compute() -> None:
        torch.mm(left, right)

    with torch.no_grad():
        alone = seconds_of([compute], cuda=device == "cuda")
        rounds = [_there_and_back(tier, large, compute) for _ in range(ROUNDS)]
        calls = [_there_and_back(tier, small, None) for _ in range(ROUNDS)]
    size = PARCEL * len(large)
    out, back = min(there for there, _, _ in rounds[1:]), min(again for _, again, _ in rounds[1:])
    pace = max(done * alone / (there + again) for there, again, done in rounds[1:])
    call = min(there + again for there, again, _ in calls) / 2 / len(small)
    store, load = (max(seconds / 2, seconds - len(large) * call) / size for seconds in (out, back))
    return Link(store, load, call, min(1.0, max(SLOWEST, pace)), tier.depth)


def _there_and_back(
    tier: Tier, tensors: list[torch.Tensor], compute: Callable[[], None] | None
) -> tuple[float, float, int]:
    """Seconds on the way out and on the way back, and how often something was computed beside."""
    parcels: list[Parcel] = []
    tier.claim([tensor.nbytes for tensor in tensors])
    try:
        started = time.perf_counter()
        parcels += (tier.store([tensor]) for tensor in tensors)
        done = _compute_beside(tier, compute)
        tier.wait()
        out = time.perf_counter() - started
        started = time.perf_counter()
        for parcel in parcels:
            tier.prefetch(parcel)
        done += _compute_beside(tier, compute)
        for parcel in parcels:
            tier.load(parcel)
        back = time.perf_counter() - started
    finally:
        for parcel in parcels:
            tier.free(parcel)
    return out, back, done


def _compute_beside(tier: Tier, compute: Callable[[], None] | None) -> int:
    """How often something can be computed while a tier is busy."""
    done = 0
    while compute is not None and tier.busy:
        compute()
        done += 1
    return done
