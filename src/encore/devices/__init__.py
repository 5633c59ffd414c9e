"""Devices that need not be here: profiles of GPUs as data, the rules by which CUDA's caching allocator reserves memory,
and the operators that run on CUDA where the CPU has others.

What a model does on a device is not here: `compiler/device_step.py` runs a step on fake tensors and asks this room.
"""

from encore.devices.caching_allocator import CachingAllocator, DeviceBlock
from encore.devices.cuda_operators import HALF, CudaOperators
from encore.devices.profiles import PROFILES, DeviceProfile, find_profile

__all__ = ["HALF", "PROFILES", "CachingAllocator", "CudaOperators", "DeviceBlock", "DeviceProfile", "find_profile"]
