"""The free memory that measurements may use."""

from __future__ import annotations

from encore.devices import free_bytes, kind_of
from encore.tiers.limits import available_memory

MOST_BYTES = 4 << 30
"""The most bytes of operands and results of a call that is measured."""
SHARE = 4
"""They may take at most the free memory divided by this."""
UNKNOWN_BYTES = 2 << 30
"""Assumed to be free if the system does not report it."""
STEP_SHARE = 0.9
"""Share of the free memory that a step may take which is run for a measurement."""
CACHE_BYTES = 64 << 20
"""Operands larger than this do not stay in caches from one call to the next."""


def has_room(footprint: int, device: str) -> bool:
    """Return whether operands and results of so many bytes may be allocated for a measurement, with most of the free
    memory left. On an accelerator nothing else waits for it: there, a measurement may take nearly all that is free."""
    free = _available() // SHARE if kind_of(device) == "cpu" else int(STEP_SHARE * free_bytes(device, cached=True))
    return footprint <= min(MOST_BYTES, free)


def sets_of_operands(footprint: int) -> int:
    """How many sets of operands alternate, so that none is more in cache than in a step."""
    return 1 if footprint > CACHE_BYTES else 2


def _available() -> int:
    found = available_memory()
    return UNKNOWN_BYTES if found is None else found


def step_has_room(footprint: int, device: str) -> bool:
    """Return whether a step that takes so many bytes may run now, beyond what is allocated already."""
    free = _available() if kind_of(device) == "cpu" else free_bytes(device, cached=True)
    return footprint <= STEP_SHARE * free
