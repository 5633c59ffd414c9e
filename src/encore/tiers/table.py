"""The tiers there are, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from encore.errors import OptionError, listed
from encore.tiers.disk import Disk
from encore.tiers.host import Host
from encore.tiers.tier import Tier

KINDS: dict[str, Callable[[], Tier]] = {"host": Host, "disk": Disk}
STEP_DEPTH = 64
"""Transfers of a step that may be under way: its schedule bounds their bytes."""
FOR_STEPS: dict[str, Callable[[], Tier]] = {"host": Host, "disk": lambda: Disk(workers=1, depth=STEP_DEPTH)}
"""For activations: one thread, so that transfers run one after the other, as their schedule assumes."""


def check_tiers(asked: Any) -> tuple[str | Tier, ...]:
    """Return names of tiers and tiers, checked; one may be given without a list."""
    if not isinstance(asked, str | Tier | list | tuple):
        raise OptionError(f"tiers={asked!r} is not accepted; give some of {listed(KINDS)}, or encore.tiers.Disk(...)")
    names = (asked,) if isinstance(asked, str | Tier) else tuple(asked)
    for name in names:
        if not isinstance(name, Tier) and (not isinstance(name, str) or name not in KINDS):
            raise OptionError(f"tiers={name!r} is not a tier; there are {listed(KINDS)} and encore.tiers.Disk(...)")
    return names


def open_tiers(asked: str | Tier | Sequence[str | Tier], stack: contextlib.ExitStack) -> tuple[Tier, ...]:
    """Return the tiers that were asked for, nearest first. Those made here go onto `stack`, to be closed with it; tiers
    that were given stay open."""
    names = check_tiers(asked)
    return tuple(name if isinstance(name, Tier) else stack.enter_context(KINDS[name]()) for name in names)
