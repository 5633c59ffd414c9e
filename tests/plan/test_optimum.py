"""The planner against the exact optimum of small random graphs, budget by budget, as HiGHS finds it.

A budget below what the planner can reach is refused, and says so: what is counted here is how fast plans are from the
planner's own floor up, and how far that floor is from the lowest there is at any price.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from encore.options import make_options
from encore.plan.budget import choose
from encore.plan.planner import Planner, candidates_of
from encore.schedule import replay, simulate
from support.exact_optimum import Program
from support.random_steps import ByBytes, kept_step, no_workspace

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Budgets on the way from the floor to the unplanned peak."""


@dataclass(frozen=True)
class Contest:
    """One graph, one budget: the seconds of the planner's step and of the fastest there is."""

    seed: int
    share: float
    planned: float
    optimal: float

    @property
    def close(self) -> bool:
        return self.planned <= 1.05 * self.optimal


def contests(seed: int) -> tuple[list[Contest], float]:
    """The planner's results on one graph, and its floor by the lowest there is."""
    kept = kept_step(seed)
    planner, program = Planner(kept, no_workspace, ByBytes()), Program(kept.schedule.graph, ByBytes())
    candidates, unplanned = candidates_of([planner]), kept.timeline.step_peak
    floor = min(candidate.plan.timeline.step_peak for candidate in candidates)
    found = []
    for share in SHARES:
        budget = floor + int(share * (unplanned - floor))
        plan = choose(candidates, make_options({"budget": budget + kept.timeline.resident})).plan
        assert plan.timeline.step_peak <= budget
        optimum = program.within(budget)
        assert optimum is not None
        assert replay(optimum.schedule) <= simulate(optimum.schedule).step_peak <= budget
        planned = plan.seconds or planner.kept_seconds
        found.append(Contest(seed, share, planned, planner.kept_seconds + optimum.seconds))
    return found, floor / program.floor()


def share_close(seeds: Iterable[int]) -> tuple[float, float, list[Contest]]:
    """The share of contests within five percent, how far the floors are off (median), and the contests lost."""
    results = [contests(seed) for seed in seeds]
    every = [contest for found, _ in results for contest in found]
    lost = [contest for contest in every if not contest.close]
    return 1 - len(lost) / len(every), statistics.median(floor for _, floor in results), lost


def test_no_plan_is_faster_than_the_optimum_and_the_model_is_the_simulators() -> None:
    for seed in (1, 4, 6):
        kept = kept_step(seed)
        program = Program(kept.schedule.graph, ByBytes())
        unplanned, floor = kept.timeline.step_peak, program.floor()
        assert program.within(floor - 1) is None
        lowest = program.within(floor)
        assert lowest is not None
        assert simulate(lowest.schedule).step_peak == floor
        nothing_to_do = program.within(unplanned)
        assert nothing_to_do is not None
        assert nothing_to_do.seconds == 0
        found, _ = contests(seed)
        assert all(contest.planned >= contest.optimal * (1 - 1e-3) for contest in found)


@pytest.mark.slow
def test_plans_are_within_five_percent_of_the_optimum() -> None:
    share, floors, lost = share_close(range(40))
    assert share >= 0.9, lost
    assert floors <= 1.35
