"""The predicted step as a memory snapshot, in the format of `torch.cuda.memory._dump_snapshot`.

PyTorch's viewer (pytorch.org/memory_viz, or `python -m torch.cuda._memory_viz trace_plot`) shows it like one that was
recorded: every allocation with the operator, module and source line behind it, coloured by kind. Sizes and order are
those of the prediction. Addresses are made up, by first fit in one segment a device, since no allocator was asked; on
CPU there are none to ask.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from encore.reports.allocations import Allocation

if TYPE_CHECKING:
    from encore.reports.report import Report

PROTOCOL = 4
"""The viewer reads pickles itself, up to this protocol, of dictionaries, lists, strings and integers."""
BASE = 0x7F0000000000
"""The first address of the first device."""
DEVICE_SPAN = 1 << 44


def snapshot_bytes(report: Report) -> bytes:
    """The snapshot as the viewer loads it."""
    return pickle.dumps(memory_snapshot(report.allocations, beside=report.beside), protocol=PROTOCOL)


def memory_snapshot(allocations: Sequence[Allocation], beside: int = 0) -> dict[str, Any]:
    """The step as segments and traces, one of each a device; `beside` bytes were there for other reasons."""
    devices = sorted({item.device for item in allocations}, key=lambda device: (device.startswith("cpu"), device))
    found: dict[str, Any] = {"segments": [], "device_traces": [], "allocator_settings": {}}
    for number, device in enumerate(devices):
        here = [item for item in allocations if item.device == device]
        segment, trace = _device(number, here, beside if number == 0 else 0)
        found["segments"].append(segment)
        found["device_traces"].append(trace)
    return found


def _device(number: int, allocations: Sequence[Allocation], beside: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    room = _Room(BASE + number * DEVICE_SPAN)
    trace: list[dict[str, Any]] = []
    standing: dict[int, tuple[int, list[dict[str, Any]]]] = {}

    def note(action: str, address: int, size: int, frames: list[dict[str, Any]], category: str) -> None:
        trace.append(
            {
                "action": action, "addr": address, "size": size, "stream": 0, "time_us": len(trace),
                "frames": frames, "category": category,
            }
        )  # fmt: skip

    def allocate(size: int, frames: list[dict[str, Any]], category: str) -> int:
        address = room.take(size)
        standing[address] = (size, frames)
        note("alloc", address, size, frames, category)
        return address

    if beside:
        allocate(beside, [_frame("beside the step (resident= or optimizer=)", "")], "beside the step")
    events = [(item.born, True, item) for item in allocations]
    events += [(item.died, False, item) for item in allocations if item.died is not None]
    address_of: dict[int, int] = {}
    for _, comes, item in sorted(events, key=lambda event: event[0]):
        if comes:
            address_of[item.born] = allocate(item.bytes, _frames(item), item.kind)
        else:
            address = address_of.pop(item.born)
            size, frames = standing.pop(address)
            note("free_requested", address, size, frames, item.kind)
            note("free_completed", address, size, frames, item.kind)
            room.give_back(address, size)
    # The viewer wants a category of this name among the others, for what it knows nothing of.
    note("snapshot", 0, 0, [], "unknown")
    return room.segment(number, standing), trace


def _frames(item: Allocation) -> list[dict[str, Any]]:
    """Innermost first: what made it, then where it belongs."""
    shape = f" {list(item.shape)}" if item.shape else ""
    made = f"{item.operator} -> {item.name}{shape}" if item.operator else f"{item.name}{shape}"
    frames = [_frame(made, item.source), _frame(item.kind, "")]
    if item.module:
        frames.insert(1, _frame(f"module {item.module}", item.source))
    return frames


def _frame(name: str, source: str) -> dict[str, Any]:
    file, _, line = source.rpartition(":")
    return {"name": name, "filename": file or "encore", "line": int(line) if line.isdigit() else 0}


@dataclass(slots=True)
class _Room:
    """One segment: holes are filled from the lowest address on, and where none is large enough the segment grows."""

    base: int
    size: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)
    """(address, size), by address; no two touch."""

    def take(self, size: int) -> int:
        for place, (address, space) in enumerate(self.holes):
            if space >= size:
                if space == size:
                    del self.holes[place]
                else:
                    self.holes[place] = (address + size, space - size)
                return address
        address = self.base + self.size
        if self.holes and sum(self.holes[-1]) == address:  # the last hole is at the end: grow from there
            address, _ = self.holes.pop()
        self.size = address + size - self.base
        return address

    def give_back(self, address: int, size: int) -> None:
        place = bisect_left(self.holes, (address, 0))
        if place < len(self.holes) and address + size == self.holes[place][0]:
            size += self.holes.pop(place)[1]
        if place and sum(self.holes[place - 1]) == address:
            before, space = self.holes[place - 1]
            self.holes[place - 1] = (before, space + size)
        else:
            self.holes.insert(place, (address, size))

    def segment(self, device: int, standing: dict[int, tuple[int, list[dict[str, Any]]]]) -> dict[str, Any]:
        """The segment as the step leaves it."""
        blocks: list[dict[str, Any]] = [
            {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
            for address, (size, frames) in standing.items()
        ]
        blocks += [
            {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
            for address, size in self.holes
        ]
        held = sum(size for size, _ in standing.values())
        return {
            "device": device, "address": self.base, "total_size": self.size, "allocated_size": held,
            "active_size": held, "requested_size": held, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "blocks": sorted(blocks, key=lambda block: block["address"]),
        }  # fmt: skip
