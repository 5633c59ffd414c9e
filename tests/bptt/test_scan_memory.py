"""What a scan holds does not grow with its length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from encore.bptt import ScanReport, scan
from support.scan_reference import Lazy
from support.watchdog import watchdog


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watchdog(300):
        yield


@pytest.mark.parametrize("tiers", [(), pytest.param(("disk",), marks=pytest.mark.slow)])
def test_the_peak_does_not_grow_with_the_length(tiers: tuple[str, ...]) -> None:
    cell = nn.LSTMCell(64, 64)

    def inputs(steps: int) -> Iterator[Tensor]:
        for _ in range(steps):
            yield torch.ones(32, 64)

    def peak(steps: int, xs: Any) -> int:
        start = torch.zeros(32, 64), torch.zeros(32, 64)
        cell.zero_grad(set_to_none=True)
        report = ScanReport()

        def train() -> None:
            (h, _), _ = scan(lambda s, x: (cell(x, s), None), start, xs, budget="1MiB", tiers=tiers, report=report)
            h.sum().backward()

        found = encore.measure(train).step_peak
        gradients = sum(parameter.nbytes for parameter in cell.parameters())
        assert found <= (1 << 20) + 3 * gradients, report
        return found

    fixed = torch.randn(800, 32, 64)
    peaks = [peak(steps, fixed[:steps]) for steps in (400, 800)]
    if tiers:  # how much is under way to the disk depends on the disk; inputs leave with their states
        peak(300, inputs(300))
        peak(600, inputs(600))
    else:
        assert max(peaks) <= 1.02 * min(peaks)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_loop_without_gradients_forgets_its_inputs(enabled: bool) -> None:
    def inputs(steps: int) -> Iterator[Tensor]:
        for _ in range(steps):
            yield torch.ones(1000)

    def peak(steps: int) -> int:
        with torch.set_grad_enabled(enabled):
            return encore.measure(lambda: scan(lambda h, x: (h + x, None), torch.zeros(1000), inputs(steps))).step_peak

    assert peak(400) == peak(40)


def test_inputs_that_are_parts_of_something_are_not_counted_whole() -> None:
    cell = nn.GRUCell(8, 8)
    many = torch.randn(1000, 2, 8)
    tapes = []
    for xs in (Lazy(many[:20]), Lazy(torch.randn(20, 2, 8))):
        report = ScanReport()
        scan(lambda h, x: (cell(x, h), None), torch.zeros(2, 8), xs, slots=2, report=report)
        tapes.append(report.tape_bytes)
    assert tapes[0] == tapes[1]
