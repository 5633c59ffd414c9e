"""Disks that fail in the middle of a scan: an error in the step that meets it, never other gradients or a deadlock."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from encore.bptt import ScanReport, scan
from encore.errors import TierError
from encore.tiers import Disk, Host
from support.watchdog import watchdog


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watchdog(600):
        yield


def train(
    tier: Any, *, steps: int = 60, report: ScanReport | None = None, before_backward: Callable[[], None] = lambda: None
) -> list[Tensor]:
    torch.manual_seed(0)
    cell = nn.GRUCell(8, 8)
    xs = torch.randn(steps, 4, 8)
    options = {"slots": 2, "tiers": tier, "schedule": "multistage", "report": report}
    carry, ys = scan(lambda h, x: (cell(x, h), h.sum()), torch.zeros(4, 8), xs, **options)
    before_backward()
    (carry.sum() + ys.sum()).backward()
    return [parameter.grad for parameter in cell.parameters() if parameter.grad is not None]


def inject(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[int], None]) -> None:
    real = getattr(os, name)
    calls = 0

    def faulty(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        fault(calls)
        return real(*arguments)

    monkeypatch.setattr(os, name, faulty)


def waits(go: threading.Event) -> None:
    go.wait()


def fails(number: int, after: int) -> Callable[[int], None]:
    def fault(call: int) -> None:
        if call > after:
            raise OSError(number, os.strerror(number))

    return fault


@pytest.mark.parametrize(
    ("call", "number", "after"),
    [
        ("pwrite", errno.ENOSPC, 3), ("pwrite", errno.EIO, 1), ("pwrite", errno.EIO, 0), ("preadv", errno.EIO, 0),
        ("preadv", errno.EIO, 1), ("posix_fallocate", errno.ENOSPC, 0),
    ],
)  # fmt: skip
def test_an_error_of_the_disk_is_an_error_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, after: int
) -> None:
    inject(monkeypatch, call, fails(number, after))
    with Disk(tmp_path) as tier, pytest.raises(TierError, match=errno.errorcode[number]):
        train(tier, steps=600)


def test_a_disk_that_is_too_small_is_known_before(tmp_path: Path) -> None:
    with Disk(tmp_path, capacity=8192) as tier, pytest.raises(TierError, match="not so much room"):
        train(tier, steps=5000)
    with Host(capacity=2000) as host, Disk(tmp_path) as tier:
        report = ScanReport()
        assert all(map(torch.equal, train((host, tier), report=report), train("host")))
        assert host.transfers.stores
        assert tier.transfers.stores
        assert report.transfers.stores == host.transfers.stores + tier.transfers.stores


def test_a_file_that_is_cut_short_in_between(tmp_path: Path) -> None:
    cell = nn.GRUCell(8, 8)
    with Disk(tmp_path) as tier:

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            tier.wait()
            return cell(x, h), None

        carry, _ = scan(step, torch.zeros(4, 8), torch.randn(60, 4, 8), slots=2, tiers=tier, schedule="multistage")
        tier.wait()
        os.ftruncate(tier._file._descriptor, 4096)
        with pytest.raises(TierError, match="cut short"):
            carry.sum().backward()


def test_a_slow_disk_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are stored when the disk has time, and what lies between them is run again."""
    expected = train("host")
    go = threading.Event()
    # The first store shows how fast the disk is; forward ends although nothing else has been written.
    inject(monkeypatch, "pwrite", lambda call: None if call == 1 else waits(go))
    report = ScanReport()
    with Disk(tmp_path, workers=1, depth=1) as tier:
        assert all(map(torch.equal, train(tier, report=report, before_backward=go.set), expected))
    assert report.counts.tier_stores <= 2
    assert report.counts.most_slots <= 2


def test_a_tier_can_be_used_again(tmp_path: Path) -> None:
    with Disk(tmp_path) as tier:
        first = train(tier)
        claimed = tier._file.claimed
        assert all(all(map(torch.equal, train(tier), first)) for _ in range(5))
        assert tier._file.claimed == claimed


def slots_in_use(tier: Disk) -> int:
    """Pages of the file that somebody holds, once nothing is on its way."""
    tier.has_room(1)
    while tier.busy:  # a state that was freed on its way back gives its slot up when it has arrived
        time.sleep(0.001)
    tier.wait()
    free = sum(size * len(slots) for size, slots in tier._file._free.items())
    return (tier._file._end - free) // 4096


@pytest.mark.parametrize("lazily", [False, True])
def test_scans_that_nobody_reverses_leave_a_tier_as_it_was(tmp_path: Path, lazily: bool) -> None:
    cell = nn.GRUCell(8, 8)
    xs = torch.randn(60, 4, 8)
    with Disk(tmp_path) as tier, Host() as host:
        for tiers in ((tier,), (host,)):
            for _ in range(5):
                given = iter(xs) if lazily else xs
                scan(lambda h, x: (cell(x, h), None), torch.zeros(4, 8), given, slots=2, tiers=tiers,
                     schedule="multistage")  # fmt: skip
        assert slots_in_use(tier) == 0
        assert host.has_room(1)
        assert host.used == 0


@pytest.mark.parametrize("calls", [6, 30, 70])
@pytest.mark.parametrize("slowly", [False, True])
def test_a_scan_that_failed_leaves_a_tier_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, slowly: bool
) -> None:
    if slowly:
        inject(monkeypatch, "preadv", lambda call: time.sleep(0.05))
    cell = nn.GRUCell(8, 8)
    count = itertools.count()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        if next(count) == calls:
            raise KeyError("mine")
        return cell(x, h), None

    with Disk(tmp_path) as tier:
        with pytest.raises(KeyError, match="mine"):
            scan(step, torch.zeros(4, 8), iter(torch.randn(60, 4, 8)), slots=2, tiers=tier, schedule="multistage")[
                0
            ].sum().backward()
        assert slots_in_use(tier) == 0


def test_a_tier_that_failed_can_be_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train("host")
    with Disk(tmp_path) as tier:
        for call, after in (("pwrite", 0), ("pwrite", 2), ("preadv", 1)):
            with monkeypatch.context() as patch:
                inject(patch, call, fails(errno.EIO, after))
                with pytest.raises(TierError, match="EIO"):
                    train(tier, steps=600)
            assert all(map(torch.equal, train(tier), expected))
            assert slots_in_use(tier) == 0


def test_a_report_counts_its_own_scan(tmp_path: Path) -> None:
    with Disk(tmp_path) as tier:
        moved = []
        for _ in range(3):
            report = ScanReport()
            train(tier, report=report)
            moved.append(report.transfers)
            assert report.transfers.stores == report.counts.tier_stores + 1, "and one to see how fast it is"
            assert report.transfers.loads == report.counts.tier_loads
        assert tier.transfers.stores == sum(one.stores for one in moved)


def test_a_report_may_serve_another_scan_before_backward(tmp_path: Path) -> None:
    cell, report = nn.GRUCell(8, 8), ScanReport()
    with Disk(tmp_path) as tier:
        ends = [
            scan(lambda h, x: (cell(x, h), None), torch.zeros(4, 8), torch.randn(steps, 4, 8), slots=2, tiers=tier,
                 schedule="multistage", report=report)[0]
            for steps in (60, 2)
        ]  # fmt: skip
        sum(end.sum() for end in ends).backward()  # type: ignore[union-attr]
    assert report.steps == 2


def test_a_tier_of_just_enough_room_can_be_used_again(tmp_path: Path) -> None:
    """States of 128 bytes take a page each at most, and all pages are free when a scan is over."""
    with Disk(tmp_path, capacity=61 * 4096) as tier:
        first = train(tier)
        assert all(map(torch.equal, train(tier), first))


def test_a_scan_that_nobody_reverses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCORE_TIER_DIR", str(tmp_path))
    before = threading.active_count()
    cell = nn.GRUCell(8, 8)
    carry, _ = encore.scan(
        lambda h, x: (cell(x, h), None), torch.zeros(4, 8), torch.randn(60, 4, 8), slots=2, tiers="disk"
    )  # fmt: skip
    del carry
    for thread in threading.enumerate():
        if thread.name.startswith("encore-disk"):
            thread.join(10)
    assert threading.active_count() <= before
    assert not list(tmp_path.iterdir())
