"""A step as its allocator sees it: the same peaks as the simulator's, and operators in their own order."""

from __future__ import annotations

import pytest

from encore.schedule import What, device_peaks, memory_events
from encore.schedule.operator_trace import OperatorTrace
from support.random_steps import kept_step


@pytest.mark.parametrize("seed", range(3))
def test_events_add_up_to_the_simulators_peak(seed: int) -> None:
    plan = kept_step(seed)
    assert device_peaks([plan.schedule], [plan.timeline]) == {"cpu": plan.timeline.step_peak}


def test_what_is_freed_was_allocated() -> None:
    plan = kept_step(0)
    alive: set[object] = set()
    for event in memory_events([plan.schedule], [plan.timeline]):
        if event.what is What.ALLOCATE:
            assert event.key not in alive
            alive.add(event.key)
        elif event.what is What.FREE:
            alive.remove(event.key)


def test_a_trace_has_results_and_workspaces_in_their_order() -> None:
    history = [
        ("alloc", 100, 0), ("segment_alloc", 2048, 4096), ("alloc", 512, 4096), ("alloc", 200, 512),
        ("free_requested", 512, 4096), ("free_completed", 512, 4096), ("alloc", 7, 1024), ("free_requested", 9, 77),
    ]  # fmt: skip
    assert OperatorTrace.of(history, [512, 0, 99]) == OperatorTrace((100, 512, 200, -2), (2, 0, None))
