"""Outcomes as text: the cells that a terminal and a page show, and the table of `encore compare`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from encore.compare.outcome import Outcome
from encore.terminal import terminal_table
from encore.units import bytes_text, seconds_text


def spread_text(median: float, lowest: float, highest: float) -> str:
    """A ratio with its lowest and highest round: '0.91 (0.88-0.97)', 'within noise' if the rounds are further apart
    than the median is from 1."""
    noise = ", within noise" if highest - lowest > abs(median - 1) else ""
    return f"{median:.2f} ({lowest:.2f}-{highest:.2f}){noise}"


def ratio_text(found: Outcome) -> str:
    """The step time over eager's."""
    if math.isnan(found.against_eager):
        return ""
    return "1.00" if found.system == "eager" else spread_text(found.against_eager, found.lowest, found.highest)


def difference_text(found: Outcome) -> str:
    """The distance of gradients from eager's."""
    if math.isnan(found.gradient_difference):
        return ""
    if math.isinf(found.gradient_difference):
        return "not numbers"
    if found.own_draws:
        return "own draws"
    return f"{found.gradient_difference:.1e}" + (", far off" if found.is_far_off else "")


def reason_text(found: Outcome) -> str:
    """Why a system has no figures."""
    return f"failed: {found.failure}" if found.failure else f"left out: {found.left_out}"


COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "system": lambda found: found.system,
    "peak": lambda found: bytes_text(found.peak),
    "less than eager": lambda found: "" if math.isnan(found.reduction) else f"{found.reduction:.2f}x",
    "predicted": lambda found: "" if found.predicted is None else bytes_text(found.predicted),
    "step": lambda found: seconds_text(found.seconds),
    "/ eager": ratio_text,
    "first step": lambda found: seconds_text(found.first_step),
    "gradients": difference_text,
    "from float64": lambda found: "" if found.gradient_error is None else f"{found.gradient_error:.1e}",
}
"""The columns of `encore compare`; adding one is adding a row here."""


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    """A table for a terminal; systems without figures follow with their reasons."""
    rows = [[cell(one) for cell in COLUMNS.values()] for one in outcomes if one.ran]
    lines = [terminal_table(list(COLUMNS), rows, words=1)] if rows else []
    lines += [f"{one.system}: {reason_text(one)}" for one in outcomes if not one.ran]
    return "\n".join(lines)
