"""The disk tier: a small pool of threads between tensors and a file.

A store hands its tensors to the queue and returns. A thread packs them into its own page-aligned buffer, takes the
checksum, and writes; a single dense tensor goes through a small buffer piece by piece. The queue is bounded: with
`depth` parcels waiting, `store` waits too and `ready` returns `False`. Nothing is copied on the caller's thread, and
packing, checksum and I/O all run without Python's lock. Tensors of a GPU are copied through pinned memory on a side
stream of the thread, behind what computes them; only that thread waits for the copy.

Tensors are made and freed by the threads that call, never by those of the pool, so that a step measured in its own
thread includes all of its memory.

Every block is checked with CRC-32 when it is loaded. zlib's runs at about 2 GB/s a thread, the speed of a fast disk, on
threads that have nothing else to do; a faster sum would not detect words that changed places.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from encore.errors import TierError
from encore.tiers.layout import PAGE, rounded
from encore.tiers.slot_file import SlotFile
from encore.tiers.streams import Events, SideStreams, record_events
from encore.tiers.tier import Block, Tier
from encore.units import check_count, parse_bytes

DIRECTORY = "ENCORE_TIER_DIR"
WORKERS = 2
DEPTH = 2
JOIN_SECONDS = 10.0
PIECE = 1 << 20
"""Bytes of a dense tensor that are written or read at a time: the workspace of a thread."""


def default_folder() -> Path:
    """Where a disk tier's file goes by default."""
    return Path(os.environ.get(DIRECTORY) or tempfile.gettempdir())


@dataclass(slots=True)
class _Slot:
    """The room of a block in the file."""

    offset: int
    checksum: int = 0


class _Lane:
    """What one thread moves bytes with: page-aligned memory, pinned for tensors of a GPU, and side streams."""

    def __init__(self) -> None:
        self.streams = SideStreams()
        self._plain = torch.frombuffer(mmap.mmap(-1, PAGE), dtype=torch.uint8)
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int, *, pinned: bool) -> tuple[Tensor, memoryview]:
        if pinned and len(self._pinned) < size:
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        elif not pinned and len(self._plain) < size:
            self._plain = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        found = self._pinned if pinned else self._plain
        return found, memoryview((ctypes.c_ubyte * size).from_address(found.data_ptr())).cast("B")


class Disk(Tier):
    """A file in `directory` ($ENCORE_TIER_DIR, else the system's folder for temporary files; mind that this may be in
    memory). At most `capacity` bytes are stored; `depth` parcels at most wait to be written, and as many may be on
    their way back."""

    name = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        capacity: int | str | None = None,
        workers: int = WORKERS,
        depth: int = DEPTH,
        direct: bool = True,
    ) -> None:
        folder = default_folder() if directory is None else Path(directory)
        if not folder.is_dir():
            raise TierError(
                f"there is no folder {str(folder)!r} for the disk tier; make it, or name another: Disk(directory=)"
            )
        most = None if capacity is None else parse_bytes(capacity, "capacity")
        super().__init__(depth)
        self.workers = check_count(workers, "workers")
        self.place = str(folder)
        self._file = SlotFile(folder, capacity=most, direct=direct)
        self._jobs: queue.SimpleQueue[Callable[[_Lane], None] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"encore-disk-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        # A tier that was not closed ends with its last reference: the threads refer to the queue, never to the tier.
        self._finalizer = weakref.finalize(self, _shut, self._jobs, self._threads, self._file)

    @property
    def direct(self) -> bool:
        """Whether the file bypasses the page cache."""
        return self._file.direct

    def memory(self, size: int) -> int:
        return self.workers * rounded(size, PAGE) + self.depth * size

    def claim(self, sizes: Sequence[int]) -> None:
        self._enter()
        self._file.claim_slots(sizes)

    def close(self) -> None:
        self._closed = True
        if os.getpid() == self._process:
            self._finalizer()
        else:
            self._finalizer.detach()

    def _has_room(self, size: int, count: int) -> bool:
        return self._file.has_room(size, count)

    def _reserve(self, block: Block) -> None:
        block.place = _Slot(self._file.take(block.bytes))

    def _release(self, block: Block) -> None:
        if block.place is not None:
            self._file.give_back(block.place.offset, block.bytes)
            block.place = None

    def _send(self, block: Block) -> None:
        computed = record_events(block.streams)
        self._jobs.put(lambda lane: self._write(block, lane, computed))

    def _fetch(self, block: Block) -> None:
        unused = record_events(block.streams)  # kernels that are queued may still use this memory
        self._jobs.put(lambda lane: self._read(block, lane, unused))

    def _await_transfer(self) -> None:
        arrived = self._changed.wait(timeout=1.0)
        if not arrived and (self._closed or not any(thread.is_alive() for thread in self._threads)):
            raise TierError("the disk tier was closed while a thread waited for it")

    def _poll(self) -> None:
        """The threads finish stores themselves."""

    def _check_open(self) -> None:
        super()._check_open()
        if os.getpid() != self._process:
            raise TierError("this disk tier belongs to the process that made it; after a fork, make another")

    # -- on the tier's threads ---------------------------------------------------------------------------------------

    def _write(self, block: Block, lane: _Lane, computed: Events) -> None:
        started = time.perf_counter()
        error: TierError | None = None
        tensors = block.tensors
        assert tensors is not None
        try:
            if not block.freed:
                checksum = 0
                with lane.streams.behind(computed):
                    for first, memory, view in _pieces(block, lane):
                        block.layout.pack(tensors, memory, first, len(view))
                        checksum = zlib.crc32(view, checksum)
                        self._file.write(block.place.offset + first, view)
                block.check_unchanged(self.name)
                block.place.checksum = checksum
        except Exception as problem:
            error = _as_tier_error(problem)
        del tensors
        with self._changed:
            block.times.stored = time.perf_counter()
            self._count_store(block, block.times.stored - started)
            self._finish_store(block, error=error)

    def _read(self, block: Block, lane: _Lane, unused: Events) -> None:
        started = time.perf_counter()
        error: TierError | None = None
        assert block.tensors is not None
        try:
            checksum = 0
            with lane.streams.behind(unused):
                for first, memory, view in _pieces(block, lane):
                    self._file.read(block.place.offset + first, view)
                    checksum = zlib.crc32(view, checksum)
                    block.layout.fill(block.tensors, memory, first, len(view))
            if checksum != block.place.checksum:
                raise TierError(
                    f"{block.bytes} bytes came back from the disk tier changed: their checksum is another; "
                    "nothing of this step can be used, look at the disk"
                )
        except Exception as problem:
            error = _as_tier_error(problem)
        with self._changed:
            block.times.fetched = started, time.perf_counter()
            self.transfers.bytes_loaded += block.bytes
            self.transfers.load_seconds += block.times.fetched[1] - started
            block.loading = False
            block.error = error
            if error is not None or block.freed:
                self._ahead.discard(block)
                self._finished.append(block)
            self._changed.notify_all()


def _work(jobs: queue.SimpleQueue[Callable[[_Lane], None] | None]) -> None:
    lane = _Lane()
    while (job := jobs.get()) is not None:
        job(lane)
        del job  # it knows the tier, which may go now


def _shut(jobs: queue.SimpleQueue, threads: Sequence[threading.Thread], file: SlotFile) -> None:
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
    if not any(thread.is_alive() for thread in threads if thread is not threading.current_thread()):
        file.close()  # else a thread is stuck in the disk, and the file goes with the process


def _pieces(block: Block, lane: _Lane) -> Iterator[tuple[int, Tensor, memoryview]]:
    """The whole pages of a block, one piece after the other: its first byte, and the buffer to move it through. What
    is not dense is packed as a whole."""
    pages = rounded(max(block.bytes, 1), PAGE)
    most = PIECE if block.layout.is_plain else pages
    for first in range(0, pages, most):
        yield first, *lane.memory(min(most, pages - first), pinned=bool(block.streams))


def _as_tier_error(problem: Exception) -> TierError:
    if isinstance(problem, TierError):
        return problem
    error = TierError(f"the disk tier failed: {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error
