"""Plans for calls that share a budget, compared with every choice there is."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from encore.plan.calls import Around, CallCosts, SharedBudget

sizes = st.integers(0, 60)
arounds = st.builds(Around, sizes, sizes, sizes)
costs = st.builds(CallCosts, sizes, sizes, sizes, st.integers(0, 50).map(float))
steps = st.lists(st.tuples(arounds, st.lists(costs, min_size=1, max_size=3)), min_size=1, max_size=5)


def peak_and_seconds(around: list[Around], chosen: tuple[CallCosts, ...]) -> tuple[int, float]:
    """Walk the step call by call."""
    kept, highest = 0, 0
    for place, cost in zip(around, chosen, strict=True):
        highest = max(highest, kept + place.forward + cost.forward_peak, kept + place.backward + cost.backward_peak)
        kept += cost.saved
        highest = max(highest, kept + place.between)
    return highest, sum(cost.seconds for cost in chosen)


@settings(deadline=None)
@given(steps)
def test_the_fastest_choice_is_found_for_every_budget(step: list[tuple[Around, list[CallCosts]]]) -> None:
    around, offered = [place for place, _ in step], [of_call for _, of_call in step]
    shared = SharedBudget(around, offered)
    every = [peak_and_seconds(around, chosen) for chosen in itertools.product(*offered)]
    assert shared.floor == min(peak for peak, _ in every)
    assert shared.within(shared.floor - 1) is None
    for limit in {peak for peak, _ in every}:
        found = shared.within(limit)
        assert found is not None
        assert found.seconds == min(seconds for peak, seconds in every if peak <= limit)
        chosen = tuple(of_call[number] for of_call, number in zip(offered, found.plans, strict=True))
        assert peak_and_seconds(around, chosen) == (found.step_peak, found.seconds)
        assert found.step_peak <= limit


def test_calls_of_one_graph_may_have_different_plans() -> None:
    fast, lean = CallCosts(saved=10, forward_peak=10, backward_peak=10, seconds=1.0), CallCosts(1, 10, 10, 2.0)
    shared = SharedBudget([Around(0, 0)] * 10, [[fast, lean]] * 10)
    found = shared.within(60)
    assert found is not None
    assert 0 < sum(found.plans) < 10
    assert found.step_peak <= 60


def test_a_thousand_calls_are_planned() -> None:
    offered = [CallCosts(saved, 40, 50 + saved, 1.0 / (1 + saved)) for saved in range(1, 8)]
    shared = SharedBudget([Around(0, 0)] * 1000, [offered] * 1000)
    assert shared.floor == 999 + 51
    half = shared.within(4000)
    assert half is not None
    assert 3500 < half.step_peak <= 4000


def test_gradients_that_a_call_is_given_count_until_their_last_use_if_it_frees_them() -> None:
    cost = CallCosts(saved=10, forward_peak=10, backward_peak=60, seconds=1.0, freeing_peak=40)
    kept, freed = (SharedBudget([Around(0, 5, frees_received=frees)], [[cost]]).floor for frees in (False, True))
    assert (kept, freed) == (65, 45)
