"""What CUDA's caching allocator reserves for a sequence of allocations and frees.

PyTorch asks the driver for segments, cuts them into blocks, and keeps what is freed for later. What a GPU runs out of
are segments, so a step that never has more than its memory allocated may still not fit. The rules are those of
`c10/cuda/CUDACachingAllocator.cpp` with default settings:

- sizes are rounded up to 512 bytes; up to 1 MiB they come from small segments of 2 MiB, up to 10 MiB from segments of
  20 MiB, and larger ones from segments of their own, rounded up to 2 MiB;
- the smallest free block that is large enough is taken, the one with the lowest address if several are as small, and
  split if what remains is worth a block of its own;
- a freed block is merged with free neighbours of its segment;
- where the driver has no room, all segments without a used block go back to it first.

It begins with nothing, or with the segments that PyTorch has reserved (`restored`).

Known shortcomings: one stream, and no expandable segments. Segments get addresses in the order in which they are
reserved, as drivers mostly hand them out; a driver that does otherwise may have the allocator pick another block among
equal ones.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

ROUNDED_TO = 512
SMALL = 1 << 20
"""The largest block from a small segment."""
SMALL_SEGMENT = 2 << 20
MEDIUM = 10 << 20
"""Blocks of this size and larger get segments of their own."""
MEDIUM_SEGMENT = 20 << 20
LARGE_ROUNDED_TO = 2 << 20


@dataclass(slots=True, eq=False)
class DeviceBlock:
    """A part of a segment. Its neighbours are those of the same segment."""

    address: int
    size: int
    small: bool
    is_free: bool = False
    before: DeviceBlock | None = None
    after: DeviceBlock | None = None

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


@dataclass(slots=True)
class _Pool:
    """Free blocks, the smallest first."""

    blocks: list[tuple[int, int, DeviceBlock]] = field(default_factory=list)

    def add(self, block: DeviceBlock) -> None:
        bisect.insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: DeviceBlock) -> None:
        self.blocks.pop(bisect.bisect_left(self.blocks, (block.size, block.address)))

    def take(self, size: int) -> DeviceBlock | None:
        """The smallest block of at least this size."""
        place = bisect.bisect_left(self.blocks, (size, -1))
        return self.blocks.pop(place)[2] if place < len(self.blocks) else None


@dataclass(frozen=True, slots=True)
class ReservedSegment:
    """A segment that PyTorch has reserved."""

    address: int
    small: bool
    blocks: tuple[tuple[int, bool], ...]
    """The size of each block, and whether it is free."""
    usable: bool = True
    """Whether the stream that is followed may take its free blocks."""

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.blocks)


class CachingAllocator:
    """Follows allocations and frees on a device of some capacity."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = math.inf if capacity is None else capacity
        self.reserved = self.peak_reserved = 0
        self.allocated = self.peak_allocated = 0
        self.ran_out = False
        """Whether an allocation did not fit; the following ones are counted as if it had."""
        self._pools = {True: _Pool(), False: _Pool()}
        self._next_address = 0
        self._restored: dict[int, DeviceBlock] = {}

    @classmethod
    def restored(cls, segments: Iterable[ReservedSegment], capacity: int | None = None) -> CachingAllocator:
        """The allocator with segments that are there already."""
        made = cls(capacity)
        for segment in segments:
            made._restore(segment)
        made.peak_reserved, made.peak_allocated = made.reserved, made.allocated
        return made

    def _restore(self, segment: ReservedSegment) -> None:
        address, before = segment.address, None
        for size, is_free in segment.blocks:
            block = DeviceBlock(address, size, segment.small, is_free and segment.usable, before)
            if before is not None:
                before.after = block
            before, address = block, address + size
            self.allocated += 0 if is_free else size
            if block.is_free:
                self._pools[segment.small].add(block)
            self._restored[block.address] = block
        self.reserved += segment.size
        self._next_address = max(self._next_address, address + LARGE_ROUNDED_TO)

    def block_at(self, address: int) -> DeviceBlock | None:
        """The used block that was restored at an address."""
        block = self._restored.get(address)
        return None if block is None or block.is_free else block

    def allocate(self, size: int) -> DeviceBlock | None:
        """A block for so many bytes; None for nothing."""
        if size == 0:
            return None
        size = rounded(size)
        small = size <= SMALL
        block = self._pools[small].take(size) or self._new_segment(size, small)
        block.is_free = False
        remaining = block.size - size
        if remaining >= ROUNDED_TO if small else remaining > SMALL:
            self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: DeviceBlock | None) -> None:
        """Give a block back."""
        if block is None:
            return
        self.allocated -= block.size
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._pools[block.small].remove(before)
            block = _merged(before, block)
        if after is not None and after.is_free:
            self._pools[block.small].remove(after)
            block = _merged(block, after)
        block.is_free = True
        self._pools[block.small].add(block)

    def use(self, size: int) -> None:
        """Allocate and free, as an operator does with its workspace."""
        self.free(self.allocate(size))

    def _new_segment(self, size: int, small: bool) -> DeviceBlock:
        segment = segment_size(size, small=small)
        if self.reserved + segment > self.capacity:
            self._release_segments()
        self.ran_out = self.ran_out or self.reserved + segment > self.capacity
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = DeviceBlock(self._next_address, segment, small)
        self._next_address += segment + LARGE_ROUNDED_TO  # no two segments are neighbours
        return block

    def _split(self, block: DeviceBlock, size: int) -> None:
        rest = DeviceBlock(block.address + size, block.size - size, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._pools[block.small].add(rest)

    def _release_segments(self) -> None:
        """Give segments back to the driver in which nothing is used."""
        for pool in self._pools.values():
            self.reserved -= sum(size for size, _, block in pool.blocks if block.is_segment)
            pool.blocks = [entry for entry in pool.blocks if not entry[2].is_segment]


def rounded(size: int) -> int:
    """The size of the block for so many bytes."""
    return max(1, -(-size // ROUNDED_TO)) * ROUNDED_TO


def segment_size(size: int, *, small: bool) -> int:
    """What is asked of the driver for a block of this size."""
    if small:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if size < MEDIUM else -(-size // LARGE_ROUNDED_TO) * LARGE_ROUNDED_TO


def _merged(first: DeviceBlock, second: DeviceBlock) -> DeviceBlock:
    """Two neighbours as one block."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
