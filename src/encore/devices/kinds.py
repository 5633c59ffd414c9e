"""The kinds of devices that steps are planned for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What planning has to know of a kind of device."""

    is_host: bool
    """Its memory is the host's: host memory is no tier of its own, and there are no streams."""
    block: int
    """The allocator returns multiples of so many bytes."""
    state_bytes: int
    """The size of a generator's state."""
    product_side: int
    """Rows and columns of the matrices whose product shows its speed."""
    copied: int
    """Bytes that are copied to find its bandwidth."""
    reserves: bool
    """Whether its allocator reserves memory, in segments: what a budget in bytes then counts is what is reserved."""
    flushed: int
    """Bytes that are copied between two timed calls: with their copy, more than the last cache has."""


KINDS = {
    "cpu": DeviceKind(
        is_host=True, block=1, state_bytes=5056, product_side=1024, copied=1 << 26, reserves=False, flushed=1 << 20
    ),
    "cuda": DeviceKind(
        is_host=False, block=512, state_bytes=16, product_side=4096, copied=1 << 28, reserves=True, flushed=1 << 26
    ),
}
"""Of other devices (MPS, XPU), neither allocator nor workspaces are known: graphs on them run as plain PyTorch, with a
warning, and tiers take no tensors of them."""


def kind_of(device: str | torch.device) -> str:
    """The kind of a device: `cuda` of `cuda:1`."""
    return str(device).partition(":")[0]
