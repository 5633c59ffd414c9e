"""The largest batch that fits a budget, by estimates alone: batches are shapes, and no step runs.

Doubling finds a size that is too large, bisection the last one that is not. Memory is nearly affine in the batch size,
so both go to where the line through two known sizes meets the limit if that is further, or closer: about five estimates
do where doubling and bisection alone would take fifteen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from encore.api import estimate_with
from encore.compiler.estimate import Estimate
from encore.errors import OptionError
from encore.options import arguments_of, make_options, parse_budget
from encore.units import bytes_text

MOST = 1 << 20
"""The search ends here even if more would fit."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch whose step fits a budget, and the plan that the budget gets it."""

    size: int
    budget: int
    predicted: int
    """Predicted peak in bytes, resident bytes included."""
    overhead: float
    """Predicted extra time over the same step unplanned, as a fraction."""
    unplanned: int
    """What the same step would take unplanned, in bytes, resident bytes included."""
    tried: tuple[int, ...]
    """The sizes that were estimated."""
    estimate: Estimate = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        names = ("size", "budget", "predicted", "overhead", "unplanned", "tried")
        return {"encore_largest": 1, **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        return (
            f"largest batch within {bytes_text(self.budget)}: {self.size}, predicted {bytes_text(self.predicted)} "
            f"(unplanned {bytes_text(self.unplanned)}), {self.overhead:.1%} more time"
        )


def largest_batch(
    model: Callable[..., Any],
    make_batch: Callable[[int], Any],
    *,
    budget: int | float | str,
    most: int = MOST,
    **options: Any,
) -> LargestBatch:
    """Return the largest batch whose step fits a budget in bytes. Nothing runs.

    `make_batch(size)` returns what the model is called with: a tensor, a tuple of arguments or a dict of keyword
    arguments. Only shapes are read, so tensors on the meta device do. `options` are those of `encore.compile`, such as
    `optimizer=`. The step must grow with the size; raises `BudgetError` if a batch of 1 does not fit.
    """
    wanted = parse_budget(budget)
    if wanted.bytes is None:
        raise OptionError(f"budget={budget!r} is another one for every batch; give bytes, such as '2GiB'")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise OptionError(f"most={most!r} is not accepted; give the largest size to try, at least 1")
    checked = dataclasses.replace(make_options({**options, "budget": wanted}), budget=None)  # every size is estimated
    made: dict[int, Estimate] = {}
    floors: dict[int, int] = {}

    def floor(size: int) -> int:
        if size not in made:
            made[size] = estimate_with(checked, model, *arguments_of(make_batch(size), "make_batch returned"))
            floors[size] = made[size].floor
        return floors[size]

    size = largest_within(wanted.bytes, floor, most)
    if not size:
        floor(1)
    found = made[size or 1]
    report = found.plan(wanted)  # raises for a batch of 1 that does not fit
    return LargestBatch(
        size=size,
        budget=wanted.bytes,
        predicted=report.resident + report.planned.step_peak,
        overhead=report.planned.overhead,
        unplanned=report.resident + report.unplanned.step_peak,
        tried=tuple(sorted(made)),
        estimate=found,
    )


def largest_within(limit: float, total: Callable[[int], float], most: int = MOST) -> int:
    """The largest size up to `most` whose `total` is within the limit, or 0; `total` grows with the size."""

    def on_the_line(one: int, other: int) -> int:
        """Where the line through two sizes meets the limit."""
        slope = (total(other) - total(one)) / (other - one)
        return int(one + (limit - total(one)) / slope) if slope > 0 else one

    fits, size = 0, 1
    while size <= most and total(size) <= limit:
        further = on_the_line(fits, size) + 1 if fits else 0
        fits, size = size, min(max(2 * size, further), max(most, size + 1))
    too_large, halve = size, False
    while too_large - fits > 1:
        gap = too_large - fits
        size = (fits + too_large) // 2 if halve else on_the_line(fits, too_large)
        size = min(max(size, fits + 1), too_large - 1)
        if total(size) <= limit:
            fits = size
        else:
            too_large = size
        halve = not halve and 2 * (too_large - fits) > gap
    return fits
