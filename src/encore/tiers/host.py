"""The host tier: from a GPU into pinned memory, on streams of its own; on a CPU, memory that the budget does not count.

A store copies into pinned blocks on one side stream, a load back on another, and events order both with the stream that
computes; only the device waits. Tensors are allocated by the stream that computes, whose pool has the memory that it
freed, and are freed there behind an event: nothing is reserved for the side streams. Pinned blocks are kept and used
again, since pinning is slow. On a machine without a GPU tensors are in host memory already and simply stay, uncopied:
useful for the states of `encore.scan`, whose budget is for computing memory, and for nothing else.

Blocks have no checksum here, unlike on disk. Bytes never leave the machine's memory, where parcels are no more likely
to change than the tensors that computing reads unchecked; on a CPU there is not even a copy, and a tensor that was
written to is recognised by its version. Links to GPUs check every packet themselves, and a sum that the processor takes
is slower than they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from encore.devices import is_here
from encore.errors import TierError
from encore.tiers.layout import PAGE, rounded
from encore.tiers.limits import available_memory
from encore.tiers.streams import Events, SideStreams, record_events
from encore.tiers.tier import Block, Tier
from encore.units import bytes_text, parse_bytes

SPARE = 256 << 20
"""Left of the memory that this process may take."""
LOOK_EVERY = 32 << 20
"""The machine is asked for room after so many bytes."""
DEPTH = 4


@dataclass(slots=True)
class _HostRoom:
    """Host memory of a block: pinned if it comes from a GPU, else that of its tensors."""

    pinned: Tensor | None = None
    sent: Events = field(default_factory=dict)
    fetched: Events = field(default_factory=dict)


class Host(Tier):
    """At most `capacity` bytes of host memory; by default, what the machine and its cgroups leave."""

    name = "host"

    def __init__(self, *, capacity: int | str | None = None, depth: int = DEPTH) -> None:
        super().__init__(depth)
        self.capacity = None if capacity is None else parse_bytes(capacity, "capacity")
        self.used = 0
        self._looked_at = -LOOK_EVERY
        self._pinned: dict[int, list[tuple[Tensor, list[torch.Event]]]] = {}
        """Pinned blocks that are free once these events have passed, by size."""
        self._outgoing, self._incoming = SideStreams(), SideStreams()

    @property
    def busy(self) -> bool:
        return super().busy or not self._incoming.idle

    def memory(self, size: int) -> int:
        return self.depth * size if is_here("cuda") else 0

    def claim(self, sizes: Sequence[int]) -> None:
        if not self.has_room(sum(sizes)):
            raise self._full(f"the {bytes_text(sum(sizes))} of a step", "feature maps go to disk: tiers=('disk',)")

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._outgoing.synchronize()
                self._incoming.synchronize()
                for blocks in (self._pinned, self._leaving, self._ahead, self._abandoned):
                    blocks.clear()

    def _has_room(self, size: int, count: int) -> bool:
        size *= count
        with self._changed:
            if self.capacity is not None:
                return self.used + size <= self.capacity
            if self.used + size - self._looked_at < LOOK_EVERY:
                return True
            available = available_memory()
            if available is not None and available < size + SPARE + LOOK_EVERY:
                return False
            self._looked_at = self.used + size
            return True

    def _full(self, needed: str, remedy: str) -> TierError:
        return TierError(
            f"the host tier holds {bytes_text(self.used)} and has no room for {needed}; "
            f"give it more, Host(capacity=...), or let {remedy}"
        )

    def _reserve(self, block: Block) -> None:
        with self._changed:
            if not self._has_room(block.bytes, 1):
                raise self._full(f"{bytes_text(block.bytes)} more", "states go on to disk: tiers=('host', 'disk')")
            self.used += block.bytes
            block.place = _HostRoom()

    def _release(self, block: Block) -> None:
        room, block.place = block.place, None
        if room is None:
            return
        self.used -= block.bytes
        self._looked_at = min(self._looked_at, self.used)
        if block.tensors is not None:  # loaded, and not taken: freed behind the copy
            for device, event in room.fetched.items():
                block.streams[device].wait_event(event)
        if room.pinned is not None:
            events = [*room.sent.values(), *room.fetched.values()]
            self._pinned.setdefault(len(room.pinned), []).append((room.pinned, events))

    def _send(self, block: Block) -> None:
        """From a GPU, copy into a pinned block on the outgoing stream, behind what computes the tensors."""
        started = time.perf_counter()
        assert block.tensors is not None
        with self._changed:
            if block.streams:
                room = block.place
                room.pinned, earlier = self._take_pinned(block.bytes)
                with self._outgoing.behind(record_events(block.streams), earlier):
                    block.layout.pack(block.tensors, room.pinned, wait=False)
                room.sent = self._outgoing.record(block.streams)
            else:
                self._finish_store(block, stored=False)
            self._count_store(block, time.perf_counter() - started)

    def _take_pinned(self, size: int) -> tuple[Tensor, list[torch.Event]]:
        size = rounded(max(size, 1), PAGE)
        free = self._pinned.get(size)
        return free.pop(0) if free else (torch.empty(size, dtype=torch.uint8, pin_memory=True), [])

    def _fetch(self, block: Block) -> None:
        """Copy back on the incoming stream, behind the store and behind what used the memory before."""
        room = block.place
        assert block.tensors is not None
        with self._incoming.behind(record_events(block.streams), room.sent.values()):
            block.layout.fill(block.tensors, room.pinned, wait=False)
        room.fetched = self._incoming.record(block.streams)
        self.transfers.bytes_loaded += block.bytes
        block.loading = False

    def _hand_over(self, block: Block, tensors: Sequence[Tensor]) -> None:
        if block.stored:
            for device, event in block.place.fetched.items():
                torch.accelerator.current_stream(device).wait_event(event)
        super()._hand_over(block, tensors)

    def _await_transfer(self) -> None:
        """The device waits: tensors are freed behind the copy, in the order of the stream that computes."""
        oldest = self._leaving[0] if self._leaving else None
        if oldest is not None and oldest.place is not None and oldest.place.sent:
            for device, event in oldest.place.sent.items():
                oldest.streams[device].wait_event(event)
            self._finish_store(oldest)
        else:
            self._changed.wait(timeout=1.0)  # another thread is about to send it

    def _poll(self) -> None:
        while self._leaving and (room := self._leaving[0].place) is not None:
            if not room.sent or not all(event.query() for event in room.sent.values()):
                return
            self._finish_store(self._leaving[0])
