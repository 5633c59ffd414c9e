"""Calls on a device are timed by its clock, each behind a copy that evicts its last cache."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from encore.cost.timing import RUNS, seconds_of
from encore.devices import KINDS
from nullcuda.null_device import counts, device_with, late_fill, watched

pytestmark = pytest.mark.measured_times


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_seconds_are_the_devices_and_not_the_hosts(device: str) -> None:
    x = torch.empty(4096, dtype=torch.uint8, device=device)

    def call() -> None:
        time.sleep(0.002)
        late_fill(x, 1, 70)

    with device_with(copy_us=300), watched():
        assert seconds_of([call], device=device) == pytest.approx(70e-6)


def test_every_call_finds_the_last_cache_full_of_other_bytes() -> None:
    at: list[int] = []
    with watched():
        seconds_of([lambda: at.append(counts().copies)], device="cuda")
    assert len(at) == RUNS + 1
    assert [later - earlier for earlier, later in itertools.pairwise(at)] == [1] * RUNS
    assert 2 * KINDS["cuda"].flushed > 126e6  # the largest last cache of those in `PROFILES`, a B200's
