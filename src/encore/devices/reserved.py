"""What an accelerator runs out of, and what is there of it: reserved segments, cuBLAS's workspaces, the context.

A process takes three things of a device: the segments that PyTorch's allocator reserves, in which tensors and the
workspaces of cuBLAS are allocated; the context (CUDA and its libraries, outside of the allocator); and what it calls
other libraries for. `memory_of` reads what is there now.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass

import torch

from encore.devices.accelerator import memory_segments
from encore.devices.caching_allocator import ReservedSegment
from encore.devices.kinds import KINDS, kind_of
from encore.devices.profiles import PROFILES
from encore.devices.torch_private import free_product_workspaces

MOST_CONTEXT = max(profile.context for profile in PROFILES.values())
"""What a context takes at most. More that is used outside of the allocator is another process's."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device as it is, with nothing cached."""

    device: str
    segments: tuple[ReservedSegment, ...]
    """What PyTorch has reserved."""
    free: int
    """Bytes that the driver has left."""
    total: int
    product_workspace: int
    """Bytes that PyTorch keeps for cuBLAS, for each thread that multiplies."""

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def usable(self) -> int:
        """Bytes that PyTorch can have reserved at once: all but what the context and other processes take."""
        return self.free + self.reserved

    @property
    def context(self) -> int:
        """Bytes that this process takes outside of PyTorch's allocator, as far as can be told."""
        return min(self.total - self.usable, MOST_CONTEXT)


def reserves(device: str | torch.device) -> bool:
    """Return whether the device has an allocator that reserves memory."""
    kind = kind_of(device)
    return kind in KINDS and KINDS[kind].reserves


def release_cached() -> None:
    """Give back what the allocator has cached, and the workspaces of cuBLAS: measuring left both behind."""
    gc.collect()
    free_product_workspaces()
    torch.accelerator.empty_cache()


@functools.cache
def product_workspace_of(index: int) -> int:
    """Bytes that PyTorch keeps for cuBLAS on a device, for each thread that multiplies: what a product leaves behind,
    since its size depends on the device and on settings."""
    release_cached()
    before = torch.accelerator.memory_allocated(index)
    one = torch.ones(1, 1, device=torch.device("cuda", index))
    torch.mm(one, one)
    del one
    return torch.accelerator.memory_allocated(index) - before


def memory_of(device: str) -> DeviceMemory:
    """The memory of a device that is here, once nothing is cached."""
    found = torch.device(device)
    index = torch.accelerator.current_device_index() if found.index is None else found.index
    product_workspace_of(index)
    release_cached()
    free, total = torch.accelerator.get_memory_info(found)
    return DeviceMemory(device, tuple(map(_segment, memory_segments(index))), free, total, product_workspace_of(index))


def _segment(found: dict[str, object]) -> ReservedSegment:
    """A segment as PyTorch describes it. Free blocks of other streams than the default one, or of private pools, serve
    nothing else."""
    blocks: list[dict[str, object]] = found["blocks"]  # type: ignore[assignment]
    return ReservedSegment(
        address=int(found["address"]),  # type: ignore[call-overload]
        small=found["segment_type"] == "small",
        blocks=tuple((int(one["size"]), one["state"] == "inactive") for one in blocks),  # type: ignore[call-overload]
        usable=found["stream"] == 0 and tuple(found["segment_pool_id"]) == (0, 0),  # type: ignore[arg-type]
    )
