"""How much memory trying something out may take."""

from __future__ import annotations

from pathlib import Path

import torch

MOST_BYTES = 4 << 30
"""Operands and results of a call that is still tried out."""
SHARE = 4
"""Nor may they take more than one part in so many of the memory that is free."""
UNKNOWN_BYTES = 2 << 30
"""Taken to be free where the system does not tell."""
STEP_SHARE = 0.9
"""Share of the free memory that a step which is run for a measurement may take."""
CACHE_BYTES = 64 << 20
"""Operands together larger than this find no cache that would keep them from one call to the next."""


def has_room(footprint: int, *, cuda: bool) -> bool:
    """May operands and results of so many bytes be made up? The step needs as much at that moment, but a user who asks
    for a plan may have little to spare."""
    free = torch.cuda.mem_get_info()[0] if cuda else _available()
    return footprint <= min(MOST_BYTES, free // SHARE)


def sets_of_operands(footprint: int) -> int:
    """How many sets of operands take turns, so that none is warmer than in a step."""
    return 1 if footprint > CACHE_BYTES else 2


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return UNKNOWN_BYTES
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return UNKNOWN_BYTES if kilobytes is None else int(kilobytes) << 10


def step_has_room(footprint: int, *, cuda: bool) -> bool:
    """May a step that takes so many bytes run now, beyond what is allocated already?"""
    free = _available()
    if cuda:
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0] + cached
    return footprint <= STEP_SHARE * free
