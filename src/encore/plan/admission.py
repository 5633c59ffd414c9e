"""Which lossy codecs a planner may use for which activations, so that their errors together stay within a bound.

The errors of different activations are rounding noise and nearly independent, so that their squares add up. The planner
is free to use any of the admitted codecs for any of the activations; what counts against the bound is therefore the
largest admitted error of each. To save the most bytes within a sum of squares is a knapsack problem: it is solved
greedily over the convex hull of each activation's (error squared, bytes saved), steepest step first (Everett, 1963:
optimal for every bound at which a step ends; Shoham and Gersho, 1988, do the same for quantizers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Admitted = frozenset[tuple[str, str]]
"""Pairs of an activation's name and a lossy codec."""


@dataclass(frozen=True, slots=True)
class LossyCandidate:
    """A lossy codec for an activation."""

    value: str
    codec: str
    saved: int
    """Bytes that it takes less than the activation, or than its smallest lossless code."""
    error: float
    """Relative error of the gradients that it causes."""


def admit(candidates: Iterable[LossyCandidate], allowed: float) -> Admitted:
    """The pairs of which any one of each activation can be used with errors of at most `allowed` together."""
    by_value: dict[str, list[LossyCandidate]] = {}
    for candidate in candidates:
        if candidate.saved > 0 and candidate.error <= allowed:
            by_value.setdefault(candidate.value, []).append(candidate)
    steps = [step for found in by_value.values() for step in _hull(found)]
    steps.sort(key=lambda step: step[0], reverse=True)  # stable: those of one activation stay in order
    reached: dict[str, float] = {}
    left, closed = allowed**2, set[str]()
    for _, chosen in steps:
        extra = chosen.error**2 - reached.get(chosen.value, 0.0) ** 2
        if chosen.value in closed or extra > left:
            closed.add(chosen.value)
            continue
        left -= extra
        reached[chosen.value] = chosen.error
    return frozenset(
        (one.value, one.codec) for value, most in reached.items() for one in by_value[value] if one.error <= most
    )


def _hull(candidates: list[LossyCandidate]) -> list[tuple[float, LossyCandidate]]:
    """The candidates on the upper convex hull of bytes saved over error squared, each with the slope to it."""
    hull: list[tuple[float, LossyCandidate]] = []
    for candidate in sorted(candidates, key=lambda one: (one.error, -one.saved)):
        if hull and candidate.saved <= hull[-1][1].saved:
            continue
        while hull and _slope(hull[-1][1], candidate) >= hull[-1][0]:
            hull.pop()
        hull.append((_slope(hull[-1][1] if hull else None, candidate), candidate))
    return hull


def _slope(before: LossyCandidate | None, after: LossyCandidate) -> float:
    saved, error = (0, 0.0) if before is None else (before.saved, before.error)
    rise = after.error**2 - error**2
    return (after.saved - saved) / rise if rise > 0 else float("inf")


def worst_of(candidates: Iterable[LossyCandidate], admitted: Admitted) -> Mapping[str, LossyCandidate]:
    """Of each activation the admitted candidate with the largest error."""
    worst: dict[str, LossyCandidate] = {}
    for one in candidates:
        if (one.value, one.codec) in admitted and (one.value not in worst or one.error > worst[one.value].error):
            worst[one.value] = one
    return worst
