"""Times that are the same on every machine and in every run, so that no test depends on how busy the machine is.

Operators and kernels cost what their arithmetic and bytes say at the constants of `cost/rates.py`, every rewrite for
speed takes half the time, and the way to a tier is the one that is assumed. Tests of timing itself, and those that want
what a user's machine would choose, are marked `measured_times`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import encore.cost.links
import encore.cost.rates
import encore.cost.seconds
import encore.rewrite.judge
from encore.fates import Link
from encore.measurements import MachineCache
from encore.tiers import Tier

HALF = 0.5


class OfThisTest(MachineCache):
    """Remembers until the test ends, and writes nothing."""

    def __init__(self) -> None:
        super().__init__(Path("never written"), "no machine")

    def save(self) -> None:
        self._unsaved = False


class FixedTimes:
    """Turned on for the whole run, and off around the tests that are marked."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()

    def turn_on(self) -> None:
        """Answer every question for a time; forget what the last test has added."""
        self.turn_off()
        cache = OfThisTest()
        for module in (encore.cost.seconds, encore.cost.rates, encore.cost.links, encore.rewrite.judge):
            self._patch.setattr(module, "machine_cache", lambda: cache)
        for kind in (encore.cost.seconds.Seconds, encore.cost.rates.Rates):
            self._patch.setattr(kind, "__init__", _timing_nothing(kind.__init__))
        self._patch.setattr(encore.cost.links, "measure_link", _assumed)
        self._patch.setattr(encore.rewrite.judge, "_ratio", lambda before, after: HALF)

    def turn_off(self) -> None:
        self._patch.undo()


def _timing_nothing(init: Any) -> Any:
    def wrapped(self: Any, *, run: bool) -> None:
        init(self, run=False)

    return wrapped


def _assumed(tier: Tier) -> Link:
    link = encore.cost.links.assumed_link()
    return Link(link.store, link.load, link.call, link.pace, tier.depth)
