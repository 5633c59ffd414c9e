"""Which of several systems to train with, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from encore.compare.outcome import Outcome
from encore.units import bytes_text

WORTH_IT = 0.95
"""A peak above this share of eager's is no reason to leave eager."""
AS_FAST = 1.05
"""Up to here, a step time over eager's counts as eager's time."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A system and the reason for it."""

    system: str
    reason: str

    def __str__(self) -> str:
        return f"recommended: {self.system} ({self.reason})"


def recommend(
    outcomes: Sequence[Outcome], *, resident: int, limit: int | None = None, smallest: bool = False
) -> Recommendation | None:
    """The fastest system within the limit on resident + peak; without a limit, the smallest peak in eager's time. With
    `smallest`, the smallest peak. None if no system ran with the right gradients."""
    right = [one for one in outcomes if one.ran and not one.is_far_off]
    if not right:
        return None
    least = min(right, key=lambda one: (one.peak, one.seconds))
    eager = next((one for one in right if one.system == "eager"), None)
    if smallest:
        return Recommendation(least.system, f"smallest peak, {_figures(least)}")
    if limit is not None:
        return _within(limit, [one for one in right if resident + one.peak <= limit], least)
    if eager is None:
        return Recommendation(least.system, f"smallest peak, {_figures(least)}; eager failed")
    best = min((one for one in right if one.against_eager <= AS_FAST), key=lambda one: one.peak, default=eager)
    if best.peak <= WORTH_IT * eager.peak:
        return Recommendation(best.system, f"smallest peak of those that take no longer than eager, {_figures(best)}")
    return Recommendation("eager", "nothing else has a smaller peak in the same time; no budget was given")


def _within(limit: int, fitting: Sequence[Outcome], least: Outcome) -> Recommendation:
    budget = bytes_text(limit)
    if not fitting:
        return Recommendation(least.system, f"smallest peak, {_figures(least)}; nothing fits the budget of {budget}")
    fastest = min(fitting, key=_time)
    eager = next((one for one in fitting if one.system == "eager"), None)
    if eager is not None and not fastest.highest < 1:
        return Recommendation("eager", f"it fits already: {budget} is enough, and nothing that fits is faster")
    return Recommendation(fastest.system, f"fastest within the budget of {budget}, {_figures(fastest)}")


def _time(one: Outcome) -> float:
    """The ratio to eager, which holds on a machine that slows down, or the seconds if eager failed."""
    return one.seconds if math.isnan(one.against_eager) else one.against_eager


def _figures(one: Outcome) -> str:
    time = "" if math.isnan(one.against_eager) else f" at {one.against_eager:.2f} of eager's time"
    return f"{bytes_text(one.peak)}{time}"
