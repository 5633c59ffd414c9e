"""The disk tier: a small pool of threads between tensors and a file.

A store hands its tensors to the queue and returns. A thread packs them into its own page-aligned buffer, takes the
checksum, and writes; a single dense tensor goes through a small buffer piece by piece. The queue is bounded: with
`depth` parcels waiting, `store` waits too and `ready` says no. Nothing is copied on the caller's thread, and packing,
checksum and I/O all run without Python's lock.

Tensors are made and let go by the threads that call, never by those of the pool, so that whoever measures a step in its
own thread sees all of its memory.

Every block is checked with CRC-32 as it comes back. zlib's runs at about 2 GB/s a thread, the speed of a fast disk, on
threads that have nothing else to do; a faster sum would not see words that changed places.
"""

from __future__ import annotations

import mmap
import os
import queue
import tempfile
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from encore.errors import TierError
from encore.tiers.layout import PAGE, Layout, layout_of, rounded
from encore.tiers.slot_file import SlotFile
from encore.tiers.tier import Parcel, Tier, Times
from encore.units import check_count, parse_bytes

DIRECTORY = "ENCORE_TIER_DIR"
WORKERS = 2
DEPTH = 2
JOIN_SECONDS = 10.0
WRITTEN_TO = "a tensor was written to while the disk tier stored it; store a copy of it instead"
PIECE = 1 << 20
"""Bytes of a dense tensor that are written or read at a time: the most that its thread holds aside."""


def default_folder() -> Path:
    """Where a disk tier's file goes if nothing is said."""
    return Path(os.environ.get(DIRECTORY) or tempfile.gettempdir())


class _Block:
    """Where a block lies. All fields change under the tier's lock, or belong to the thread that moves the block. It
    does not know its tier, which could not go otherwise."""

    __slots__ = ("bytes", "checksum", "error", "freed", "layout", "loading", "offset", "tensors", "times", "versions",
                 "written")  # fmt: skip

    def __init__(self, layout: Layout, tensors: list[Tensor]) -> None:
        self.bytes = layout.bytes
        self.layout = layout
        self.tensors: list[Tensor] | None = tensors
        """Held until they are written, and again from when they are to be read until they are loaded."""
        self.versions = [tensor._version for tensor in tensors]
        self.times = Times()
        self.offset = -1
        self.checksum = 0
        self.written = False
        self.loading = False
        self.freed = False
        self.error: TierError | None = None


class DiskParcel(Parcel):
    """A block, for whoever stored it."""

    __slots__ = ("block",)

    def __init__(self, tier: Tier, block: _Block) -> None:
        super().__init__(tier, block.bytes, block.times)
        self.block = block


class _Buffer:
    """Page-aligned memory of one thread."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, PAGE)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def of(self, size: int) -> tuple[Tensor, memoryview]:
        if len(self.memory) < size:
            self.memory = mmap.mmap(-1, size)
            self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        return self.bytes, memoryview(self.memory)[:size]


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
        super().__init__()
        self.workers = check_count(workers, "workers")
        self.depth = check_count(depth, "depth")
        self.place = str(folder)
        self._file = SlotFile(folder, capacity=most, direct=direct)
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[Callable[[_Buffer], None] | None] = queue.SimpleQueue()
        self._waiting = 0
        """Stores that are not written yet."""
        self._written: list[_Block] = []
        """Those whose tensors can go."""
        self._ahead = 0
        """Parcels on their way back, or back and not loaded."""
        self._reading = 0
        """Parcels on their way back."""
        self._failure: TierError | None = None
        self._abandoned: deque[_Block] = deque()
        """Freed by the next call, since whoever lets them go may do so in the midst of another."""
        self._process = os.getpid()
        self._closed = False
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"encore-disk-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        # A tier that nobody closed goes when nobody knows it any more: threads know the queue, never the tier.
        self._finalizer = weakref.finalize(self, _shut, self._jobs, self._threads, self._file)

    @property
    def direct(self) -> bool:
        """Does the file bypass the page cache?"""
        return self._file.direct

    @property
    def busy(self) -> bool:
        with self._changed:
            return self._waiting + self._reading > 0

    def memory(self, size: int) -> int:
        return self.workers * rounded(size, PAGE) + self.depth * size

    def ready(self, size: int) -> bool:
        self._check_open()
        with self._changed:
            self._settle()
            self._raise_failure()
            return self._waiting < self.depth

    def has_room(self, size: int, count: int = 1) -> bool:
        self._check_open()
        self._free_abandoned()
        return self._file.has_room(size, count)

    def store(self, tensors: Sequence[Tensor]) -> DiskParcel:
        self._check_open()
        self._free_abandoned()
        block = _Block(layout_of(tensors), list(tensors))
        with self._changed:
            self._raise_failure()
            if self._waiting >= self.depth:
                self._wait_until(lambda: self._waiting < self.depth or self._failure is not None)
                self._raise_failure()
            self._settle()
            self._waiting += 1
        try:
            block.offset = self._file.take(block.bytes)
            arrived = _arrival(tensors)
        except BaseException:
            with self._changed:
                self._waiting -= 1
                self._release(block)
                self._changed.notify_all()
            raise
        self._jobs.put(lambda buffer: self._write(block, buffer, arrived))
        return DiskParcel(self, block)

    def prefetch(self, parcel: Parcel) -> bool:
        self._check_open()
        found = self._own(parcel)
        with self._changed:
            self._settle()
            if found.tensors is not None or found.error is not None:
                return True  # it is here or coming, or `load` has an error to tell
            if self._ahead >= self.depth:
                return False
            self._begin_loading(found)
        return True

    def load(self, parcel: Parcel) -> list[Tensor]:
        self._check_open()
        found = self._own(parcel)
        with self._changed:
            self.transfers.loads += 1
            self._settle()
            while found.tensors is None or found.loading:  # another thread may take what it waited for, too
                if found.error is not None:
                    raise found.error
                self._own(parcel)
                if not found.loading:
                    self._begin_loading(found)
                self._wait_until(lambda: not found.loading)
                self._settle()
            if not found.written:
                if [tensor._version for tensor in found.tensors] != found.versions:
                    raise TierError(WRITTEN_TO)
                self.transfers.from_memory += 1
                return list(found.tensors)
            tensors, found.tensors = found.tensors, None
            self._ahead -= 1
            self._changed.notify_all()
            return tensors

    def free(self, parcel: Parcel) -> None:
        if self._closed:
            return
        self._free(self._own(parcel))

    def _free(self, block: _Block) -> None:
        with self._changed:
            self._settle()
            block.freed = True
            if (not block.written and block.error is None) or block.loading:
                return  # it is still moving; its slot comes back when that is done
            if block.tensors is not None:
                self._ahead -= 1
            self._release(block)

    def _free_abandoned(self) -> None:
        while self._abandoned:
            block = self._abandoned.popleft()
            if not block.freed:
                self._free(block)

    def wait_for(self, parcel: Parcel) -> None:
        self._check_open()
        found = self._own(parcel)
        with self._changed:
            if not found.written:
                self._wait_until(lambda: found.written)
            self._settle()
            if found.error is not None:
                raise found.error

    def abandon(self, parcel: Parcel) -> None:
        if isinstance(parcel, DiskParcel):
            self._abandoned.append(parcel.block)  # which does not know its tier

    def claim(self, sizes: Sequence[int]) -> None:
        self._check_open()
        self._free_abandoned()
        self._file.claim_slots(sizes)

    def forgive(self) -> None:
        self._check_open()
        with self._changed:
            self._failure = None

    def wait(self) -> None:
        self._check_open()
        with self._changed:
            self._wait_until(lambda: self._waiting == 0)
            self._settle()
            self._raise_failure()

    def close(self) -> None:
        self._closed = True
        if os.getpid() == self._process:
            self._finalizer()
        else:
            self._finalizer.detach()

    # -- on the tier's threads ---------------------------------------------------------------------------------------

    def _write(self, block: _Block, buffer: _Buffer, arrived: Callable[[], None]) -> None:
        started = time.perf_counter()
        error: TierError | None = None
        tensors = block.tensors
        assert tensors is not None
        try:
            if not block.freed:
                arrived()
                checksum = 0
                for first, memory, view in _pieces(block, buffer):
                    block.layout.pack(tensors, memory, first, len(view))
                    checksum = zlib.crc32(view, checksum)
                    self._file.write(block.offset + first, view)
                if [tensor._version for tensor in tensors] != block.versions:
                    raise TierError(WRITTEN_TO)
                block.checksum = checksum
        except Exception as problem:
            error = _as_tier_error(problem)
        del tensors
        with self._changed:
            self._waiting -= 1
            self.transfers.stores += 1
            self.transfers.bytes_stored += block.bytes
            block.times.stored = time.perf_counter()
            seconds = block.times.stored - started
            self.transfers.store_seconds += seconds
            self.transfers.fastest_store = min(self.transfers.fastest_store, seconds)
            block.written = True
            self._written.append(block)
            if error is not None and not block.freed:
                block.error = self._failure = error
            self._changed.notify_all()

    def _read(self, block: _Block, buffer: _Buffer) -> None:
        started = time.perf_counter()
        error: TierError | None = None
        assert block.tensors is not None
        try:
            checksum = 0
            for first, memory, view in _pieces(block, buffer):
                self._file.read(block.offset + first, view)
                checksum = zlib.crc32(view, checksum)
                block.layout.fill(block.tensors, memory, first, len(view))
            if checksum != block.checksum:
                raise TierError(
                    f"{block.bytes} bytes came back from the disk tier changed: their checksum is another; "
                    "nothing of this step can be used, look at the disk"
                )
        except Exception as problem:
            error = _as_tier_error(problem)
        with self._changed:
            self.transfers.bytes_loaded += block.bytes
            block.times.fetched = started, time.perf_counter()
            self.transfers.load_seconds += block.times.fetched[1] - started
            block.loading = False
            self._reading -= 1
            block.error = error
            if error is not None or block.freed:
                self._ahead -= 1
                self._written.append(block)
            self._changed.notify_all()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        started = time.perf_counter()
        while not self._changed.wait_for(reached, timeout=1.0):
            if self._closed or not any(thread.is_alive() for thread in self._threads):
                raise TierError("the disk tier was closed while a thread waited for it")
        self.transfers.waited_seconds += time.perf_counter() - started

    def _begin_loading(self, block: _Block) -> None:
        self._ahead += 1
        self._reading += 1
        block.tensors = block.layout.make()
        block.loading = True
        self._jobs.put(lambda buffer: self._read(block, buffer))

    def _settle(self) -> None:
        """Let go of what the pool is done with."""
        for block in self._written:
            block.tensors = None
            if block.freed:
                self._release(block)
        self._written.clear()

    def _release(self, block: _Block) -> None:
        block.tensors = None
        if block.offset >= 0:
            self._file.give_back(block.offset, block.bytes)
            block.offset = -1

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _own(self, parcel: Parcel) -> _Block:
        if not isinstance(parcel, DiskParcel) or parcel.tier is not self:
            raise TierError("this parcel belongs to another tier; give it to the one that stored it")
        if parcel.block.freed:
            raise TierError("this parcel was freed; its bytes are gone")
        return parcel.block

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("this disk tier was closed; make another")
        if os.getpid() != self._process:
            raise TierError("this disk tier belongs to the process that made it; after a fork, make another")


def _work(jobs: queue.SimpleQueue[Callable[[_Buffer], None] | None]) -> None:
    buffer = _Buffer()
    while (job := jobs.get()) is not None:
        job(buffer)
        del job  # it knows the tier, which may go now


def _shut(jobs: queue.SimpleQueue, threads: Sequence[threading.Thread], file: SlotFile) -> None:
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
    if not any(thread.is_alive() for thread in threads if thread is not threading.current_thread()):
        file.close()  # else a thread is stuck in the disk, and the file goes with the process


def _pieces(block: _Block, buffer: _Buffer) -> Iterator[tuple[int, Tensor, memoryview]]:
    """The whole pages of a block, one piece after the other: its first byte, and the buffer to move it through. What
    is not dense is packed as a whole."""
    pages = rounded(max(block.bytes, 1), PAGE)
    most = PIECE if block.layout.is_plain else pages
    for first in range(0, pages, most):
        yield first, *buffer.of(min(most, pages - first))


def _arrival(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """To call before reading tensors on another thread: waits for the device that is still computing them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _as_tier_error(problem: Exception) -> TierError:
    if isinstance(problem, TierError):
        return problem
    error = TierError(f"the disk tier failed: {type(problem).__name__}: {problem}")
    error.__cause__ = problem
    return error
