"""Devices: what differs between them, those that this process uses, and GPUs that need not be here.

`KINDS` is the table of what differs. Code elsewhere speaks `torch.accelerator`, `torch.Stream` and `torch.Event`;
`torch.cuda` is used in `accelerator.py` alone, and its private API in `torch_private.py`. GPUs that are not here are
profiles as data, with the rules by which CUDA's caching allocator reserves memory and the operators that run on CUDA
where the CPU has others.

What a model does on a device is not here: `compiler/device_step.py` runs a step on fake tensors and asks this room.
"""

from encore.devices.accelerator import (
    capability,
    default_generator,
    default_generators,
    device_names,
    devices_in_use,
    free_bytes,
    generators_kept,
    is_here,
    processors,
    synchronize,
)
from encore.devices.caching_allocator import CachingAllocator, DeviceBlock, ReservedSegment
from encore.devices.cuda_operators import HALF, CudaOperators
from encore.devices.kinds import KINDS, DeviceKind, kind_of
from encore.devices.profiles import PROFILES, DeviceProfile, find_profile
from encore.devices.reserved import DeviceMemory, memory_of, release_cached, reserves

__all__ = [
    "HALF", "KINDS", "PROFILES", "CachingAllocator", "CudaOperators", "DeviceBlock", "DeviceKind", "DeviceMemory",
    "DeviceProfile", "ReservedSegment", "capability", "default_generator", "default_generators", "device_names",
    "devices_in_use", "find_profile", "free_bytes", "generators_kept", "is_here", "kind_of", "memory_of",
    "processors", "release_cached", "reserves", "synchronize",
]  # fmt: skip
