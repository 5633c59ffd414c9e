"""One file with page-aligned slots, unlinked as soon as it is open: a process that dies leaves nothing behind.

Space is claimed with `posix_fallocate` before anything is written into it, so that a disk that is too small fails
early; if the file lies in memory, as a folder for temporary files may, the free memory and the limits of cgroups are
checked first, since a process that claims more is killed. Direct I/O if the file system has it, so that the page cache
neither doubles the memory nor delays writes; else buffered I/O, whose pages the system takes
back when memory is short.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from encore.errors import TierError
from encore.tiers.layout import PAGE, rounded
from encore.tiers.limits import available_memory, free_disk, lies_in_memory
from encore.units import bytes_text

GROWTH = 64 << 20
"""The file grows by so many bytes at a time at most."""
SPARE = 64 << 20
"""Left on the disk for other processes."""


class SlotFile:
    """Slots of any size, reused by size; the whole file is reused once all slots are free. Offsets are given out and
    taken back under a lock; I/O needs none."""

    def __init__(self, directory: Path, *, capacity: int | None, direct: bool) -> None:
        self.directory = directory
        self.capacity = capacity
        self.claimed = 0
        """Bytes of the file that are backed by the disk."""
        self._end = 0
        self._taken = 0
        """Slots in use."""
        self._free: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self.direct = False
        self._descriptor = self._open(direct)
        self.in_memory = lies_in_memory(self._descriptor)

    def _open(self, direct: bool) -> int:
        """Open a file without a name or, if the file system has none, with a name for a moment. Some file systems
        reject O_DIRECT when a file is opened, others when it is first written."""
        ways = [getattr(os, "O_DIRECT", 0)] if direct else []
        for way in (*filter(None, ways), 0):
            with contextlib.suppress(OSError, AttributeError):
                descriptor = os.open(self.directory, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | way, 0o600)
                self.direct = bool(way)
                return descriptor
        try:
            descriptor, path = tempfile.mkstemp(prefix="encore-", suffix=".tier", dir=self.directory)
        except OSError as error:
            raise TierError(
                f"the disk tier cannot make a file in {str(self.directory)!r}: {error.strerror}; "
                "name another folder, Disk(directory=...)"
            ) from error
        try:
            if direct and hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    direct_descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
                    os.close(descriptor)
                    descriptor, self.direct = direct_descriptor, True
        finally:
            Path(path).unlink()
        return descriptor

    def take(self, size: int) -> int:
        """Return the offset of a free slot; raises `TierError` if there is no room for one."""
        size = rounded(max(size, 1), PAGE)
        with self._lock:
            if self._free.get(size):
                offset = self._free[size].pop()
            else:
                offset = self._end
                if offset + size > self.claimed:
                    self._claim(offset + size)
                self._end = offset + size
            self._taken += 1
            return offset

    def give_back(self, offset: int, size: int) -> None:
        with self._lock:
            self._free.setdefault(rounded(max(size, 1), PAGE), []).append(offset)
            self._taken -= 1
            if not self._taken:  # slots of other sizes may follow
                self._end = 0
                self._free.clear()

    def claim_slots(self, sizes: Sequence[int]) -> None:
        """Claim the bytes that slots of these sizes need beyond those that are free."""
        with self._lock:
            missing = self._missing(Counter(rounded(max(size, 1), PAGE) for size in sizes))
            if missing and self._end + missing > self.claimed:
                self._claim(self._end + missing, exactly=True)

    def has_room(self, size: int, count: int = 1) -> bool:
        with self._lock:
            end = self._end + self._missing({rounded(max(size, 1), PAGE): count})
            if end <= self.claimed:
                return True
            fits = self.capacity is None or end <= self.capacity
            return fits and end - self.claimed + SPARE <= self._room()

    def _missing(self, wanted: Mapping[int, int]) -> int:
        """Bytes that slots, counted by size, need beyond those that are free."""
        return sum(size * max(0, count - len(self._free.get(size, ()))) for size, count in wanted.items())

    def _room(self) -> int:
        """Bytes that the file could grow by."""
        try:
            free = free_disk(self._descriptor)
        except OSError as error:
            raise self._failed("asking for room", error) from error
        left = available_memory() if self.in_memory else None
        return free if left is None else min(free, left)

    def _claim(self, needed: int, *, exactly: bool = False) -> None:
        if self.capacity is not None and needed > self.capacity:
            raise TierError(
                f"the disk tier is full: {bytes_text(needed)} are needed, and it may take {bytes_text(self.capacity)}; "
                "give it more, Disk(capacity=...), or more memory, so that fewer states leave it"
            )
        free = self._room()
        if needed - self.claimed + SPARE > free:
            place = f"{str(self.directory)!r}{', which lies in memory' if self.in_memory else ''}"
            raise TierError(
                f"no room for {bytes_text(needed - self.claimed)} more in {place}: {bytes_text(free)} "
                f"are free, and {bytes_text(SPARE)} of them must stay free; name another folder, Disk(directory=...)"
            )
        size = needed if exactly else min(needed + GROWTH, (self.claimed + free - SPARE) // PAGE * PAGE)
        size = size if self.capacity is None else min(size, self.capacity)
        size = rounded(max(size, needed), PAGE)
        try:
            os.posix_fallocate(self._descriptor, self.claimed, size - self.claimed)
        except OSError as error:
            raise self._failed("claiming space", error) from error
        self.claimed = size

    def write(self, offset: int, block: memoryview) -> None:
        """Write a whole number of pages."""
        done = 0
        while done < len(block):
            done += self._transfer("writing", os.pwrite, block[done:], offset + done)

    def read(self, offset: int, block: memoryview) -> None:
        """Read a whole number of pages; fewer bytes are an error, never zeros."""
        done = 0
        while done < len(block):
            count = self._transfer("reading", os.preadv, [block[done:]], offset + done)
            if count == 0:
                raise TierError(
                    f"the disk tier's file ends after {done} of {len(block)} bytes at {offset}: it was cut short by "
                    "another program; nothing of this step can be used"
                )
            done += count

    def _transfer(self, doing: str, call: Callable[..., int], block: object, offset: int) -> int:
        """Return how many bytes one call to the system has moved."""
        while True:
            direct = self.direct  # as it was: another thread may be rejected, and end it, at the same time
            try:
                return call(self._descriptor, block, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise self._failed(doing, error) from error
                self._without_direct()

    def _without_direct(self) -> None:
        """Go on without direct I/O, on the same open file: the file system took O_DIRECT and then rejects the call."""
        import fcntl

        with self._lock:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self.direct = False

    def _failed(self, doing: str, error: OSError) -> TierError:
        advice = "name another folder, Disk(directory=...)" if error.errno == errno.ENOSPC else "look at the disk"
        return TierError(
            f"the disk tier failed while {doing} in {str(self.directory)!r}: {error.strerror} "
            f"({errno.errorcode.get(error.errno or 0, error.errno)}); {advice}"
        )

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
