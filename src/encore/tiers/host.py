"""The host tier: from a GPU into pinned memory, on streams of its own; on a CPU, memory that the budget does not count.

A store copies into pinned blocks on one side stream, a load back on another, and events order both with the stream that
computes; only the device waits. Pinned blocks are kept and used again, since pinning is slow. On a machine without a
GPU tensors are in host memory already and simply stay, uncopied: useful for the states of `encore.scan`, whose budget
is for computing memory, and for nothing else. Only that half is tested without a GPU.

Blocks have no checksum here, unlike on disk. Bytes never leave the machine's memory, where parcels are no more likely
to change than the tensors that computing reads unchecked; on a CPU there is not even a copy, and a tensor that was
written to is recognised by its version. Links to GPUs check every packet themselves, and a sum that the processor takes
is slower than they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encore.errors import TierError
from encore.tiers.layout import PAGE, rounded
from encore.tiers.limits import available_memory
from encore.tiers.tier import Block, Parcel, Tier
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
    sent: torch.cuda.Event | None = None
    fetched: torch.cuda.Event | None = None


class Host(Tier):
    """At most `capacity` bytes of host memory; by default, what the machine and its cgroups leave."""

    name = "host"

    def __init__(self, *, capacity: int | str | None = None, depth: int = DEPTH) -> None:
        super().__init__(depth)
        self.capacity = None if capacity is None else parse_bytes(capacity, "capacity")
        self.used = 0
        self._looked_at = -LOOK_EVERY
        self._pinned: dict[int, list[Tensor]] = {}
        """Pinned blocks that are free, by size."""
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        """Of each GPU, the outgoing and the incoming one."""

    @property
    def busy(self) -> bool:
        return super().busy or not all(incoming.query() for _, incoming in list(self._streams.values()))

    def memory(self, size: int) -> int:
        return self.depth * size if torch.cuda.is_available() else 0

    def claim(self, sizes: Sequence[int]) -> None:
        if not self.has_room(sum(sizes)):
            raise self._full(f"the {bytes_text(sum(sizes))} of a step", "feature maps go to disk: tiers=('disk',)")

    def load(self, parcel: Parcel) -> list[Tensor]:
        tensors = super().load(parcel)
        room = parcel.block.place
        if room is not None and room.fetched is not None:  # loaded, and not still in memory
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                current = torch.cuda.current_stream(device)
                current.wait_event(room.fetched)
                for tensor in tensors:
                    if tensor.device == device:
                        tensor.record_stream(current)
        return tensors

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                for pair in self._streams.values():
                    for stream in pair:
                        stream.synchronize()
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
        if room.pinned is not None:
            for event in (room.sent, room.fetched):
                if event is not None:
                    event.synchronize()
            self._pinned.setdefault(len(room.pinned), []).append(room.pinned)

    def _send(self, block: Block) -> None:
        """From a GPU, copy into a pinned block on the outgoing stream, behind what computes the tensors."""
        started = time.perf_counter()
        assert block.tensors is not None
        with self._changed:
            device = next((tensor.device for tensor in block.tensors if tensor.is_cuda), None)
            if device is None:
                self._finish_store(block, stored=False)
            else:
                room = block.place
                size = rounded(max(block.bytes, 1), PAGE)
                free = self._pinned.get(size)
                room.pinned = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=True)
                outgoing, _ = self._streams_of(device)
                outgoing.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(outgoing):
                    block.layout.pack(block.tensors, room.pinned, wait=False)
                    room.sent = torch.cuda.Event()
                    room.sent.record(outgoing)
            self._count_store(block, time.perf_counter() - started)

    def _fetch(self, block: Block) -> None:
        """Copy back on the incoming stream, behind the store."""
        room = block.place
        device = next(entry.device for entry in block.layout.entries if entry.device.type == "cuda")
        _, incoming = self._streams_of(device)
        incoming.wait_event(room.sent)
        with torch.cuda.stream(incoming):
            block.tensors = block.layout.make()
            block.layout.fill(block.tensors, room.pinned, wait=False)
            room.fetched = torch.cuda.Event()
            room.fetched.record(incoming)
        self.transfers.bytes_loaded += block.bytes
        block.loading = False

    def _await_transfer(self) -> None:
        if self._leaving and self._leaving[0].place is not None and self._leaving[0].place.sent is not None:
            self._leaving[0].place.sent.synchronize()
            self._poll()
        else:
            self._changed.wait(timeout=1.0)  # another thread is about to send it

    def _poll(self) -> None:
        while self._leaving and (room := self._leaving[0].place) is not None:
            if room.sent is None or not room.sent.query():
                return
            self._finish_store(self._leaving[0])

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]
