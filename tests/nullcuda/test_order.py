"""The order of work: races are seen whichever access comes first, ordered accesses are none, and the clock overlaps
what may run at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nullcuda.null_device import acquire, device_with, late_fill, note_host, release, set_thread_apart, watched

BYTES = 4096


def memory() -> torch.Tensor:
    return torch.zeros(BYTES, dtype=torch.uint8, device="cuda")


def write(x: torch.Tensor) -> None:
    late_fill(x, 1, 0)


def read(x: torch.Tensor) -> None:
    torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def by_an_event(first: torch.Stream, then: torch.Stream) -> None:
    then.wait_event(first.record_event())


def by_the_host(first: torch.Stream, then: torch.Stream) -> None:
    first.synchronize()


def by_a_query(first: torch.Stream, then: torch.Stream) -> None:
    event = first.record_event()
    while not event.query():
        pass


def by_the_device(first: torch.Stream, then: torch.Stream) -> None:
    torch.accelerator.synchronize()


def not_at_all(first: torch.Stream, then: torch.Stream) -> None:
    pass


def by_an_event_that_is_too_early(first: torch.Stream, then: torch.Stream) -> None:
    then.wait_event(torch.Stream("cuda").record_event())


ORDERED = [by_an_event, by_the_host, by_a_query, by_the_device]


@pytest.mark.parametrize("streams", [0, 1])
@pytest.mark.parametrize("order", [*ORDERED, not_at_all, by_an_event_that_is_too_early])
@pytest.mark.parametrize(
    ("first", "then", "kinds"),
    [(write, read, "read after write"), (read, write, "write after read"), (write, write, "write after write"),
     (read, read, "")],
)  # fmt: skip
def test_accesses_on_two_streams(
    first: Callable[[torch.Tensor], None], then: Callable[[torch.Tensor], None], kinds: str,
    order: Callable[[torch.Stream, torch.Stream], None], streams: int,
) -> None:  # fmt: skip
    x = memory()
    one, other = torch.Stream("cuda"), torch.Stream("cuda")
    with device_with(streams=streams), watched() as seen:
        with one:
            first(x)
        order(one, other)
        with other:
            then(x)
        expected = [] if order in ORDERED or not kinds else [kinds]
        assert [race.partition(":")[0] for race in seen.races] == expected


def test_a_race_names_both_sides() -> None:
    x = memory()
    with watched() as seen:
        write(x)
        with torch.Stream("cuda"):
            read(x[100:200])
        assert seen.races == ["read after write: copy (actor 2) is not behind kernel (actor 1)"]


def test_other_bytes_are_no_race() -> None:
    x = memory()
    with watched() as seen:
        write(x[:1000])
        with torch.Stream("cuda"):
            write(x[1000:])
            assert seen.races == []
            write(x[999:])
        assert len(seen.races) == 1


def test_memory_that_is_freed_under_a_copy() -> None:
    side = torch.Stream("cuda")
    for kept in (True, False):
        x = memory()
        torch.cuda.synchronize()
        with device_with(streams=1, copy_us=20_000), watched() as seen:
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                read(x)
            if kept:
                x.record_stream(side)
            del x
            write(memory())
            assert bool(seen.races) == (not kept)


def test_pinned_memory_that_the_host_reads() -> None:
    x, pinned = memory(), torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
    with watched() as seen:
        pinned.copy_(x, non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        note_host(pinned.data_ptr(), BYTES, writes=False, what="file")
        assert seen.races == []
        pinned.copy_(x, non_blocking=True)  # not read again before this
        assert seen.races == []
        note_host(pinned.data_ptr(), BYTES, writes=False, what="file")
        assert seen.races == ["read after write: file (the host) is not behind copy (actor 1)"]


def test_what_a_thread_has_seen_passes_through_locks_alone() -> None:
    import threading

    x = memory()

    def work(locked: bool) -> None:
        set_thread_apart()
        if locked:
            acquire(7)
        with torch.Stream("cuda"):
            read(x)

    for locked in (True, False):
        with watched() as seen:
            write(x)
            torch.cuda.synchronize()
            release(7)
            thread = threading.Thread(target=work, args=(locked,))
            thread.start()
            thread.join()
            assert bool(seen.races) == (not locked)


def test_the_clock_overlaps_streams_and_engines() -> None:
    x, y = memory(), memory()
    here, there = (torch.empty(BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    out, back = torch.Stream("cuda"), torch.Stream("cuda")
    with device_with(copy_us=1000), watched() as seen:
        late_fill(x, 1, 5000)
        assert seen.microseconds == 5000
        with out:
            for _ in range(3):
                here.copy_(y, non_blocking=True)
        with back:
            y.copy_(there, non_blocking=True)
        assert seen.microseconds == 5000
        with back:  # one engine copies to the host, whatever the stream
            here.copy_(y, non_blocking=True)
        assert seen.microseconds == 5000
        back.wait_stream(torch.accelerator.current_stream())
        with back:
            here.copy_(y, non_blocking=True)
        assert seen.microseconds == 6000
        torch.accelerator.synchronize()
        late_fill(x, 1, 500)
        assert seen.microseconds == 6500
