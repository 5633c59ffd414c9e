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
from dataclasses import dataclass

import torch
from torch import Tensor

from encore.devices import is_here
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
    stream: torch.Stream | None = None
    """The stream that computes: the tensors' memory is in its pool."""
    sent: torch.Event | None = None
    fetched: torch.Event | None = None

    @property
    def events(self) -> list[torch.Event]:
        return [event for event in (self.sent, self.fetched) if event is not None]


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
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}
        """Of each GPU, the outgoing and the incoming one."""

    @property
    def busy(self) -> bool:
        return super().busy or not all(incoming.query() for _, incoming in list(self._streams.values()))

    def memory(self, size: int) -> int:
        return self.depth * size if is_here("cuda") else 0

    def claim(self, sizes: Sequence[int]) -> None:
        if not self.has_room(sum(sizes)):
            raise self._full(f"the {bytes_text(sum(sizes))} of a step", "feature maps go to disk: tiers=('disk',)")

    def load(self, parcel: Parcel) -> list[Tensor]:
        tensors = super().load(parcel)
        room = parcel.block.place
        if room is not None and room.fetched is not None:  # loaded, and not still in memory
            current = torch.accelerator.current_stream(room.stream.device)
            current.wait_event(room.fetched)
            if current != room.stream:
                for tensor in tensors:
                    if tensor.is_cuda:
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
            if room.fetched is not None:  # tensors that were loaded, and not taken, are free by now
                room.stream.wait_event(room.fetched)
            self._pinned.setdefault(len(room.pinned), []).append((room.pinned, room.events))

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
                outgoing, _ = self._streams_of(device)
                free = self._pinned.get(size)
                room.pinned, earlier = (
                    free.pop(0) if free else (torch.empty(size, dtype=torch.uint8, pin_memory=True), [])
                )
                for event in earlier:
                    outgoing.wait_event(event)
                room.stream = torch.accelerator.current_stream(device)
                outgoing.wait_stream(room.stream)
                with outgoing:
                    block.layout.pack(block.tensors, room.pinned, wait=False)
                room.sent = outgoing.record_event()
            self._count_store(block, time.perf_counter() - started)

    def _fetch(self, block: Block) -> None:
        """Copy back on the incoming stream, behind the store and behind what used the memory before."""
        room = block.place
        device = next(entry.device for entry in block.layout.entries if entry.device.type == "cuda")
        _, incoming = self._streams_of(device)
        room.stream = torch.accelerator.current_stream(device)
        block.tensors = block.layout.make()
        incoming.wait_event(room.sent)
        incoming.wait_stream(room.stream)
        with incoming:
            block.layout.fill(block.tensors, room.pinned, wait=False)
        room.fetched = incoming.record_event()
        self.transfers.bytes_loaded += block.bytes
        block.loading = False

    def _await_transfer(self) -> None:
        """The device waits: tensors are freed behind the copy, in the order of the stream that computes."""
        room = self._leaving[0].place if self._leaving else None
        if room is not None and room.sent is not None:
            room.stream.wait_event(room.sent)
            self._finish_store(self._leaving[0])
        else:
            self._changed.wait(timeout=1.0)  # another thread is about to send it

    def _poll(self) -> None:
        while self._leaving and (room := self._leaving[0].place) is not None:
            if room.sent is None or not room.sent.query():
                return
            self._finish_store(self._leaving[0])

    def _streams_of(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device), torch.Stream(device)
        return self._streams[device]
