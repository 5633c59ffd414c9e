"""Which system is recommended, and the sentence that says so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from encore.compare.outcome import Outcome
from encore.compare.recommendation import recommend

MIB = 2**20


def outcome(system: str, peak: int, ratio: float = 1.0, **more: Any) -> Outcome:
    spread = {"against_eager": ratio, "lowest": ratio - 0.02, "highest": ratio + 0.02, **more}
    return Outcome(system, seconds=0.5 if math.isnan(ratio) else 0.5 * ratio, peak=peak * MIB, **spread)


EAGER = outcome("eager", 100, lowest=1.0, highest=1.0)
FOUND = [
    EAGER,
    outcome("checkpoint", 40, 1.3),
    outcome("torch.compile", 90, 0.8),
    outcome("Encore", 50, 1.01),
    outcome("Encore, budget='min'", 20, 1.6),
    Outcome("activation_memory_budget 0.1", failure="RuntimeError: no"),
    outcome("wrong", 1, 0.1, gradient_difference=0.7),
]


@pytest.mark.parametrize(
    ("budget", "system", "reason"),
    [
        (200, "torch.compile", "fastest within the budget of 200.00 MiB, 90.00 MiB at 0.80 of eager's time"),
        (80, "Encore", "fastest within the budget of 80.00 MiB, 50.00 MiB at 1.01 of eager's time"),
        (35, "Encore, budget='min'", "fastest within the budget of 35.00 MiB, 20.00 MiB at 1.60 of eager's time"),
        (
            20,
            "Encore, budget='min'",
            "smallest peak, 20.00 MiB at 1.60 of eager's time; nothing fits the budget of 20.00 MiB",
        ),
        (None, "Encore", "smallest peak of those that take no longer than eager, 50.00 MiB at 1.01 of eager's time"),
    ],
)
def test_a_budget_decides(budget: int | None, system: str, reason: str) -> None:
    limit = None if budget is None else budget * MIB
    found = recommend(FOUND, resident=5 * MIB, limit=limit)
    assert found is not None
    assert (found.system, found.reason) == (system, reason)
    assert str(found) == f"recommended: {system} ({reason})"


def test_eager_is_recommended_if_it_fits_and_nothing_is_faster() -> None:
    found = recommend([EAGER, outcome("Encore", 50, 0.99)], resident=0, limit=100 * MIB)
    assert found is not None
    assert (found.system, found.reason) == (
        "eager",
        "it fits already: 100.00 MiB is enough, and nothing that fits is faster",
    )
    found = recommend([EAGER, outcome("Encore", 97)], resident=0)
    assert found is not None
    assert found.system == "eager"


def test_the_smallest_peak_if_that_is_wanted_or_if_eager_failed() -> None:
    found = recommend(FOUND, resident=0, smallest=True)
    assert found is not None
    assert found.system == "Encore, budget='min'"
    alone = [Outcome("eager", failure="MemoryError"), outcome("Encore", 50, math.nan)]
    found = recommend(alone, resident=0)
    assert found is not None
    assert str(found) == "recommended: Encore (smallest peak, 50.00 MiB; eager failed)"
    assert recommend([FOUND[-2], FOUND[-1]], resident=0) is None
