"""The host tier: from a GPU into pinned memory, on streams of its own; on a CPU, memory that the budget does not count.

A store copies into pinned blocks on one side stream, a load back on another, and events order both with the stream that
computes; nobody waits but the device. Pinned blocks are kept and used again, since pinning is slow. On a machine
without a GPU tensors are in host memory already and simply stay, uncopied: useful for the states of `encore.scan`,
whose budget is for computing memory, and for nothing else. Only that half is tested where there is no GPU.

Blocks have no checksum here, unlike on disk. Bytes never leave the machine's memory, where parcels are no more likely
to change than the tensors that nobody checks; on a CPU there is not even a copy, and a tensor that was written to is
known by its version. Links to GPUs check every packet themselves, and a sum that the processor takes is slower than
they are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from encore.errors import TierError
from encore.tiers.layout import Layout, layout_of, rounded
from encore.tiers.limits import available_memory
from encore.tiers.tier import Parcel, Tier
from encore.units import bytes_text, check_count, parse_bytes

SPARE = 256 << 20
"""Left of the memory that this process may take."""
LOOK_EVERY = 32 << 20
"""The machine is asked for room after so many bytes."""
DEPTH = 4


class HostParcel(Parcel):
    __slots__ = ("block", "freed", "layout", "loaded", "returned", "stored", "tensors", "versions")

    def __init__(self, tier: Tier, layout: Layout) -> None:
        super().__init__(tier, layout.bytes)
        self.layout = layout
        self.freed = False
        self.tensors: list[Tensor] | None = None
        """On a CPU, what was stored; on a GPU, held until the copy has left."""
        self.versions: list[int] = []
        self.block: Tensor | None = None
        self.stored: torch.cuda.Event | None = None
        self.loaded: list[Tensor] | None = None
        self.returned: torch.cuda.Event | None = None


class Host(Tier):
    """At most `capacity` bytes of host memory; where nothing is said, what the machine and its cgroups leave."""

    name = "host"

    def __init__(self, *, capacity: int | str | None = None, depth: int = DEPTH) -> None:
        super().__init__()
        self.capacity = None if capacity is None else parse_bytes(capacity, "capacity")
        self.depth = check_count(depth, "depth")
        self.used = 0
        self._looked_at = -LOOK_EVERY
        self._closed = False
        self._lock = threading.RLock()
        self._blocks: dict[int, list[Tensor]] = {}
        self._leaving: list[HostParcel] = []
        self._ahead: set[HostParcel] = set()
        """Brought back before they were asked for."""
        self._abandoned: deque[HostParcel] = deque()
        """Freed by the next call, since whoever lets them go may do so in the midst of another."""
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    @property
    def busy(self) -> bool:
        with self._lock:
            self._settle()
            streams = [incoming for _, incoming in self._streams.values()]
        return bool(self._leaving) or not all(stream.query() for stream in streams)

    def memory(self, size: int) -> int:
        return self.depth * size if torch.cuda.is_available() else 0

    def ready(self, size: int) -> bool:
        self._check_open()
        with self._lock:
            self._settle()
            return len(self._leaving) < self.depth

    def has_room(self, size: int, count: int = 1) -> bool:
        self._check_open()
        self._free_abandoned()
        size *= count
        with self._lock:
            if self.capacity is not None:
                return self.used + size <= self.capacity
            if self.used + size - self._looked_at < LOOK_EVERY:
                return True
            available = available_memory()
            if available is not None and available < size + SPARE + LOOK_EVERY:
                return False
            self._looked_at = self.used + size
            return True

    def store(self, tensors: Sequence[Tensor]) -> HostParcel:
        self._check_open()
        layout = layout_of(tensors)
        parcel = HostParcel(self, layout)
        with self._lock:
            if not self.has_room(layout.bytes):
                raise TierError(
                    f"the host tier holds {bytes_text(self.used)} and has no room for {bytes_text(layout.bytes)} more; "
                    "give it more, Host(capacity=...), or let states go on to disk: tiers=('host', 'disk')"
                )
            started = time.perf_counter()
            self.used += layout.bytes
            apart = {id(tensor): tensor.detach() for tensor in tensors}
            parcel.tensors = [apart[id(tensor)] for tensor in tensors]  # what was one tensor stays one
            if any(tensor.is_cuda for tensor in tensors):
                self._send(parcel)
            else:
                parcel.versions = [tensor._version for tensor in tensors]
            self.transfers.stores += 1
            self.transfers.bytes_stored += layout.bytes
            seconds = time.perf_counter() - started
            self.transfers.store_seconds += seconds
            self.transfers.fastest_store = min(self.transfers.fastest_store, seconds)
        return parcel

    def prefetch(self, parcel: Parcel) -> bool:
        self._check_open()
        found = self._own(parcel)
        with self._lock:
            if found.block is None or found.loaded is not None:
                return True
            if len(self._ahead) >= self.depth:
                return False
            self._bring(found)
            self._ahead.add(found)
        return True

    def load(self, parcel: Parcel) -> list[Tensor]:
        self._check_open()
        found = self._own(parcel)
        with self._lock:
            self.transfers.loads += 1
            self.transfers.bytes_loaded += found.bytes
            if found.block is None:
                assert found.tensors is not None
                if [tensor._version for tensor in found.tensors] != found.versions:
                    raise TierError("a tensor was written to after the host tier took it; store a copy of it instead")
                self.transfers.from_memory += 1
                return list(found.tensors)
            if found.loaded is None:
                self._bring(found)
            assert found.loaded is not None
            assert found.returned is not None
            tensors, found.loaded = found.loaded, None
            self._ahead.discard(found)
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                current = torch.cuda.current_stream(device)
                current.wait_event(found.returned)
                for tensor in tensors:
                    if tensor.device == device:
                        tensor.record_stream(current)
            return tensors

    def free(self, parcel: Parcel) -> None:
        if self._closed:
            return
        found = self._own(parcel)
        with self._lock:
            found.freed = True
            found.tensors = found.loaded = None
            self._ahead.discard(found)
            self.used -= found.bytes
            self._looked_at = min(self._looked_at, self.used)
            if found.block is not None:
                for event in (found.stored, found.returned):
                    if event is not None:
                        event.synchronize()
                self._blocks.setdefault(len(found.block), []).append(found.block)
                found.block = None

    def abandon(self, parcel: Parcel) -> None:
        if isinstance(parcel, HostParcel):
            if parcel.block is None:
                parcel.tensors = None
            self._abandoned.append(parcel)

    def _free_abandoned(self) -> None:
        while self._abandoned:
            parcel = self._abandoned.popleft()
            if not parcel.freed:
                self.free(parcel)

    def wait_for(self, parcel: Parcel) -> None:
        self._check_open()
        found = self._own(parcel)
        with self._lock:
            if found.stored is not None:
                started = time.perf_counter()
                found.stored.synchronize()
                self.transfers.waited_seconds += time.perf_counter() - started
            self._settle()

    def claim(self, sizes: Sequence[int]) -> None:
        self._check_open()
        needed = sum(sizes)
        if not self.has_room(needed):
            raise TierError(
                f"the host tier holds {bytes_text(self.used)} and has no room for the {bytes_text(needed)} of a step; "
                "give it more, Host(capacity=...), or let feature maps go to disk: tiers=('disk',)"
            )

    def forgive(self) -> None:
        self._check_open()

    def wait(self) -> None:
        self._check_open()
        with self._lock:
            for parcel in self._leaving:
                assert parcel.stored is not None
                parcel.stored.synchronize()
            self._settle()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                for pair in self._streams.values():
                    for stream in pair:
                        stream.synchronize()
                self._blocks.clear()
                self._leaving.clear()
                self._ahead.clear()
                self._abandoned.clear()

    # -- a GPU's side ------------------------------------------------------------------------------------------------

    def _send(self, parcel: HostParcel) -> None:
        """Copy into a pinned block on the outgoing stream, behind what computes the tensors."""
        started = time.perf_counter()
        self._settle()
        while len(self._leaving) >= self.depth:
            oldest = self._leaving[0].stored
            assert oldest is not None
            oldest.synchronize()
            self._settle()
        self.transfers.waited_seconds += time.perf_counter() - started
        assert parcel.tensors is not None
        device = next(tensor.device for tensor in parcel.tensors if tensor.is_cuda)
        outgoing, _ = self._streams_of(device)
        size = rounded(max(parcel.bytes, 1), 1 << 12)
        kept = self._blocks.get(size)
        parcel.block = kept.pop() if kept else torch.empty(size, dtype=torch.uint8, pin_memory=True)
        outgoing.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(outgoing):
            packed = -1
            for tensor, place in zip(parcel.tensors, parcel.layout.places, strict=True):
                if place > packed:
                    entry = parcel.layout.entries[place]
                    room = parcel.block[entry.position : entry.position + entry.bytes].view(entry.dtype)
                    distinct = tensor.as_strided(entry.packed_shape, entry.strides).contiguous()
                    room.view(entry.packed_shape).copy_(distinct, non_blocking=True)
                    packed = place
            parcel.stored = torch.cuda.Event()
            parcel.stored.record(outgoing)
        self._leaving.append(parcel)

    def _bring(self, parcel: HostParcel) -> None:
        """Copy back on the incoming stream, behind the store."""
        assert parcel.block is not None
        assert parcel.stored is not None
        device = next(entry.device for entry in parcel.layout.entries if entry.device.type == "cuda")
        _, incoming = self._streams_of(device)
        incoming.wait_event(parcel.stored)
        with torch.cuda.stream(incoming):
            made = []
            for entry in parcel.layout.entries:
                values = parcel.block[entry.position : entry.position + entry.bytes].view(entry.dtype)
                values = values.view(entry.packed_shape).to(entry.device, non_blocking=True)
                memory = torch.empty(entry.lead + entry.span, dtype=entry.dtype, device=entry.device)
                memory.as_strided(entry.packed_shape, entry.strides, entry.lead).copy_(values)
                made.append(memory.as_strided(entry.shape, entry.strides, entry.lead))
            parcel.loaded = [made[place] for place in parcel.layout.places]
            parcel.returned = torch.cuda.Event()
            parcel.returned.record(incoming)

    def _settle(self) -> None:
        """Let go of tensors whose copies have left."""
        while self._leaving and self._leaving[0].stored is not None and self._leaving[0].stored.query():
            self._leaving.pop(0).tensors = None

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    # ----------------------------------------------------------------------------------------------------------------

    def _own(self, parcel: Parcel) -> HostParcel:
        if not isinstance(parcel, HostParcel) or parcel.tier is not self:
            raise TierError("this parcel belongs to another tier; give it to the one that stored it")
        if parcel.freed:
            raise TierError("this parcel was freed; its bytes are gone")
        return parcel

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("this host tier was closed; make another")
