"""Disks that fill up, fail, lie, shrink or crawl: an error where it is met, never other numbers, never a deadlock."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encore.errors import EncoreError, TierError
from encore.tiers import Disk, Host, Parcel, Tier, limits, slot_file
from support.watchdog import watchdog

Fault = Callable[..., Any]


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watchdog(600):
        yield


def inject(monkeypatch: pytest.MonkeyPatch, name: str, fault: Fault) -> None:
    real = getattr(os, name)
    monkeypatch.setattr(os, name, lambda *arguments: fault(real, *arguments))


def failing_from(call: int, number: int) -> Fault:
    seen = 0

    def fault(real: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen >= call:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return fault


def after(go: threading.Event) -> Fault:
    """Every call waits for the event."""

    def fault(real: Callable[..., Any], *arguments: Any) -> Any:
        go.wait()
        return real(*arguments)

    return fault


def when_it_waits(monkeypatch: pytest.MonkeyPatch, tier: Disk, then: Callable[[], None]) -> list[bool]:
    """Do something when a call waits for the disk, before it waits; the list has an entry for each time."""
    wait_until, waited = tier._wait_until, list[bool]()

    def waiting(reached: Callable[[], bool]) -> None:
        waited.append(True)
        then()
        wait_until(reached)

    monkeypatch.setattr(tier, "_wait_until", waiting)
    return waited


def store_many(tier: Tier, count: int = 20) -> list[Parcel]:
    return [tier.store([torch.full((2000,), float(number))]) for number in range(count)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_store_that_fails_is_told_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    inject(monkeypatch, "pwrite", failing_from(4, number))
    with Disk(tmp_path) as tier:
        with pytest.raises(TierError, match=f"while writing.*{errno.errorcode[number]}") as caught:
            store_many(tier, 100)
        assert isinstance(caught.value, EncoreError)
        with pytest.raises(TierError, match=errno.errorcode[number]):
            tier.ready(8)


def test_the_disk_fills_up_while_space_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "posix_fallocate", failing_from(1, errno.ENOSPC))
    with Disk(tmp_path) as tier, pytest.raises(TierError, match=r"claiming space.*ENOSPC.*another folder"):
        tier.store([torch.zeros(10)])


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_a_folder_in_memory_asks_memory_and_cgroups_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with Disk("/dev/shm", direct=False) as tier:
        assert tier._file.in_memory
        monkeypatch.setattr(slot_file, "available_memory", lambda: slot_file.SPARE + 8192)
        tier.claim([8192])
        with pytest.raises(TierError, match=r"more in '/dev/shm', which lies in memory: 64.01 MiB are free"):
            tier.claim([1 << 20])
        assert not tier.has_room(1 << 20)


def test_room_is_asked_for_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_file, "free_disk", lambda descriptor: (64 << 20) + 40_000)
    with Disk(tmp_path) as tier:
        assert tier.has_room(36_000)
        assert not tier.has_room(50_000)
        with pytest.raises(TierError, match=r"no room for .* more in .*are free"):
            tier.claim([1 << 20])
        tier.store([torch.zeros(2000)])
        with pytest.raises(TierError, match="no room"):
            tier.store([torch.zeros(20_000)])
    with Disk(tmp_path, capacity=100_000) as tier, pytest.raises(TierError, match=r"is full.*may take 97\.66 KiB"):
        store_many(tier)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    with Disk(tmp_path) as tier:
        parcels = store_many(tier)
        tier.wait()
        os.ftruncate(tier._file._descriptor, 8192)
        assert tier.load(parcels[0])[0].eq(0).all()
        with pytest.raises(TierError, match="cut short"):
            tier.load(parcels[-1])


def test_bytes_that_changed_on_disk(tmp_path: Path) -> None:
    with Disk(tmp_path, direct=False) as tier:
        parcels = store_many(tier)
        tier.wait()
        os.pwrite(tier._file._descriptor, b"\x01", 5 * 8192 + 100)
        for number, parcel in enumerate(parcels):
            if number != 5:
                assert tier.load(parcel)[0].eq(number).all()
        with pytest.raises(TierError, match="checksum"):
            tier.load(parcels[5])
        with pytest.raises(TierError, match="checksum"):
            tier.load(parcels[5])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_read_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    with Disk(tmp_path) as tier:
        parcels = store_many(tier)
        tier.wait()
        inject(monkeypatch, "preadv", failing_from(2, errno.EIO))
        assert tier.load(parcels[3])[0].eq(3).all()
        if ahead:
            tier.prefetch(parcels[4])
        with pytest.raises(TierError, match=r"while reading.*EIO"):
            tier.load(parcels[4])


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "pwrite", lambda real, file, block, offset: real(file, block[:4096], offset))
    inject(monkeypatch, "preadv", lambda real, file, blocks, offset: real(file, [blocks[0][:4096]], offset))
    with Disk(tmp_path) as tier:
        for number, parcel in enumerate(store_many(tier)):
            tier.wait()
            assert tier.load(parcel)[0].eq(number).all()


def test_direct_writes_that_are_refused_become_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Disk(tmp_path) as tier:
        if not tier.direct:
            pytest.skip("no direct I/O here")

        def refuse(real: Callable[..., Any], *arguments: Any) -> Any:
            if tier.direct:
                raise OSError(errno.EINVAL, "refused")
            return real(*arguments)

        inject(monkeypatch, "pwrite", refuse)
        parcels = store_many(tier)
        tier.wait()
        assert not tier.direct
        assert all(tier.load(parcel)[0].eq(number).all() for number, parcel in enumerate(parcels))


def test_two_threads_are_refused_direct_writes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have asked before either is told no: the second must not take the first one's remedy for its own failure."""
    with Disk(tmp_path, workers=2, depth=4) as tier:
        if not tier.direct:
            pytest.skip("no direct I/O here")
        for call in ("pwrite", "preadv"):
            both = threading.Barrier(2)
            asked = threading.local()
            monkeypatch.setattr(tier._file, "direct", True)

            def refuse(
                real: Callable[..., Any],
                *arguments: Any,
                both: threading.Barrier = both,
                asked: threading.local = asked,
            ) -> Any:
                if not hasattr(asked, "once"):
                    asked.once = True
                    both.wait(30)
                    raise OSError(errno.EINVAL, "refused")
                return real(*arguments)

            inject(monkeypatch, call, refuse)
            if call == "pwrite":
                parcels = store_many(tier, 4)
                tier.wait()
            else:
                assert all(tier.prefetch(parcel) for parcel in parcels)
            assert all(tier.load(parcel)[0].eq(number).all() for number, parcel in enumerate(parcels))
            monkeypatch.undo()


def test_a_disk_that_cannot_be_asked_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Disk(tmp_path) as tier:
        inject(monkeypatch, "fstatvfs", failing_from(1, errno.EIO))
        with pytest.raises(TierError, match=r"asking for room.*EIO"):
            tier.store([torch.zeros(10)])
        with pytest.raises(TierError, match=r"asking for room.*EIO"):
            tier.has_room(10)
        tier.wait()
        assert not tier.busy
        monkeypatch.undo()
        assert tier.load(tier.store([torch.ones(10)]))[0].sum() == 10


def test_anything_that_stops_a_store_leaves_the_queue_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Disk(tmp_path) as tier:
        for fault in (KeyboardInterrupt, MemoryError):
            with monkeypatch.context() as patch:
                patch.setattr(tier._file, "take", lambda size, fault=fault: (_ for _ in ()).throw(fault()))
                with pytest.raises(fault):
                    tier.store([torch.zeros(10)])
        tier.wait()
        assert not tier.busy


def test_the_file_grows_into_what_is_free_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 10 * 4096
    with Disk(tmp_path) as tier:
        monkeypatch.setattr(slot_file, "free_disk", lambda _: slot_file.SPARE + room - tier._file.claimed)
        tier.store([torch.zeros(1000)])
        assert tier._file.claimed == room
        tier.store([torch.zeros(9000)])
        assert not tier.has_room(4097)


def test_a_store_that_failed_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "pwrite", failing_from(1, errno.ENOSPC))
    with Disk(tmp_path) as tier:
        parcel = tier.store([torch.zeros(10)])
        with pytest.raises(TierError, match="ENOSPC"):
            tier.wait()
        assert tier.prefetch(parcel)
        assert not tier.busy
        with pytest.raises(TierError, match="ENOSPC"):
            tier.load(parcel)
        tier.free(parcel)
        tier.forgive()
        tier.wait()


def test_a_slow_disk_pushes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    inject(monkeypatch, "pwrite", after(go))
    with Disk(tmp_path, workers=1, depth=2) as tier:
        waited = when_it_waits(monkeypatch, tier, go.set)
        first = tier.store([torch.zeros(10)])
        second = tier.store([torch.ones(10)])
        assert not go.is_set(), "two stores return although nothing has been written"
        assert not tier.ready(40)
        assert tier.load(second)[0].sum() == 10, "what is not written yet is still in memory"
        assert not waited
        store_many(tier, 10)
        assert waited, "the third one waits until there is room in the queue"
        assert tier.transfers.waited_seconds > 0
        assert tier.load(first)[0].sum() == 0


def test_tensors_written_to_on_their_way_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    inject(monkeypatch, "pwrite", after(go))
    with Disk(tmp_path, workers=1) as tier:
        tier.store([torch.zeros(10)])
        written = torch.zeros(10)
        parcel = tier.store([written])
        written += 1
        with pytest.raises(TierError, match="written to while"):
            tier.load(parcel)
        go.set()
        with pytest.raises(TierError, match="written to while"):
            tier.wait()
        with pytest.raises(TierError, match="written to while"):
            tier.load(parcel)
    with Host() as host:
        written = torch.zeros(10)
        taken = host.store([written])
        written += 1
        with pytest.raises(TierError, match="written to after"):
            host.load(taken)


def test_closing_wakes_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    inject(monkeypatch, "pwrite", after(go))
    tier = Disk(tmp_path, workers=1, depth=1)
    tier.store([torch.zeros(10)])
    closer = threading.Thread(target=tier.close)
    waited = when_it_waits(monkeypatch, tier, closer.start)
    with pytest.raises(TierError, match="closed"):
        tier.store([torch.zeros(10)])
    assert waited
    go.set()
    closer.join()


def test_memory_limits_of_the_first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's own group is the root of its tree, whatever path it is told."""
    group = tmp_path / "memory" / "outer"
    group.mkdir(parents=True)
    for folder, limit in ((group, str((1 << 63) - 4096)), (group.parent, "3000")):
        (folder / "memory.limit_in_bytes").write_text(limit)
        (folder / "memory.usage_in_bytes").write_text("2500")
        (folder / "memory.stat").write_text("cache 5\ninactive_file 7\ntotal_inactive_file 100\n")
    own = tmp_path / "cgroup"
    own.write_text("5:cpu,cpuacct:/outer\n4:memory:/outer/inner\n0::/outer\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    monkeypatch.setattr(limits, "OWN_CGROUP", own)
    assert limits.available_memory() == 600


def test_memory_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    for folder, limit, used in ((group, "max", 10), (group.parent, "3000", 2500)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    monkeypatch.setattr(limits, "OWN_CGROUP", own)
    assert limits.available_memory() == 600
    monkeypatch.setattr(limits, "OWN_CGROUP", tmp_path / "nothing")
    monkeypatch.setattr(limits, "MEMINFO", tmp_path / "nothing")
    assert limits.available_memory() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2 kB\n")
    monkeypatch.setattr(limits, "MEMINFO", tmp_path / "meminfo")
    assert limits.available_memory() == 2048
    with Host() as tier, pytest.raises(TierError, match="no room"):
        tier.store([torch.zeros(10)])
