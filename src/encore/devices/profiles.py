"""GPUs as data: what `encore.estimate(device=...)` knows of a device that is not here.

Memory is what PyTorch reports as the device's total (the figure in its out-of-memory errors), which is less than what
the name promises. Rates are the vendor's peak figures without sparsity: rooflines made of them are lower bounds of
seconds, and no prediction. `context` is what CUDA, cuBLAS and cuDNN take of a process, outside of PyTorch's allocator:
an assumption, since it depends on driver and libraries.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from encore.errors import OptionError, listed

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device as data."""

    name: str
    memory: int
    """Bytes."""
    capability: tuple[int, int]
    """CUDA's compute capability."""
    bandwidth: float
    """Bytes a second of its memory."""
    flops: float
    """Operations a second in float32, on its ordinary units."""
    tensor_flops: float
    """Operations a second in float16, on its tensor cores."""
    context: int
    """Bytes that a process takes outside of PyTorch's allocator."""

    @property
    def usable(self) -> int:
        """Bytes that the allocator can reserve."""
        return self.memory - self.context

    @property
    def product_workspace(self) -> int:
        """Bytes that PyTorch reserves for cuBLAS in every thread that multiplies matrices."""
        return 32 * MIB if self.capability >= (9, 0) else 4096 * 1024 * 2 + 16 * 1024 * 8

    @property
    def has_flash_attention(self) -> bool:
        """Whether attention in half precision runs on PyTorch's flash kernels."""
        return self.capability >= (8, 0)


def _profile(
    name: str, gib: float, capability: tuple[int, int], gigabytes: float, teraflops: float, tensor: float, context: int
) -> DeviceProfile:
    return DeviceProfile(
        name, int(gib * GIB), capability, gigabytes * 1e9, teraflops * 1e12, tensor * 1e12, context * MIB
    )


PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        _profile("T4", 14.56, (7, 5), 320, 8.1, 65, 330),
        _profile("V100-16GB", 15.77, (7, 0), 900, 15.7, 125, 400),
        _profile("V100-32GB", 31.73, (7, 0), 900, 15.7, 125, 400),
        _profile("RTX2080Ti", 10.75, (7, 5), 616, 13.4, 108, 330),
        _profile("RTX3060", 11.75, (8, 6), 360, 12.7, 51, 330),
        _profile("RTX3070", 7.66, (8, 6), 448, 20.3, 81, 330),
        _profile("RTX3080", 9.76, (8, 6), 760, 29.8, 119, 330),
        _profile("RTX3090", 23.68, (8, 6), 936, 35.6, 142, 330),
        _profile("RTX4060", 7.64, (8, 9), 272, 15.1, 121, 330),
        _profile("RTX4070", 11.72, (8, 9), 504, 29.1, 233, 330),
        _profile("RTX4080", 15.70, (8, 9), 717, 48.7, 390, 330),
        _profile("RTX4090", 23.64, (8, 9), 1008, 82.6, 330, 400),
        _profile("A10G", 22.05, (8, 6), 600, 31.2, 125, 400),
        _profile("A100-40GB", 39.39, (8, 0), 1555, 19.5, 312, 450),
        _profile("A100-80GB", 79.15, (8, 0), 2039, 19.5, 312, 450),
        _profile("A6000", 47.53, (8, 6), 768, 38.7, 155, 400),
        _profile("L4", 22.03, (8, 9), 300, 30.3, 121, 400),
        _profile("L40S", 44.39, (8, 9), 864, 91.6, 362, 400),
        _profile("H100", 79.10, (9, 0), 3350, 66.9, 989, 550),
        _profile("H200", 139.80, (9, 0), 4800, 66.9, 989, 550),
        _profile("B200", 178.35, (10, 0), 8000, 75.0, 2250, 650),
    )
}
ALIASES = {
    "V100": "V100-32GB", "A100": "A100-40GB", "A100-SXM4-40GB": "A100-40GB", "A100-SXM4-80GB": "A100-80GB",
    "H100-80GB": "H100", "H100-SXM5-80GB": "H100", "A10": "A10G", "RTXA6000": "A6000",
}  # fmt: skip


def find_profile(device: str | DeviceProfile) -> DeviceProfile:
    """The profile of a device by name, as `"RTX 3060"`, `"rtx3060"` or `"NVIDIA GeForce RTX 3060 12GB"`."""
    if isinstance(device, DeviceProfile):
        return device
    if not isinstance(device, str):
        raise OptionError(f"device={device!r} is not a device; give a name ({listed(PROFILES)}) or a DeviceProfile")
    wanted = _plain(device)
    known = {_plain(name): profile for name, profile in PROFILES.items()}
    known |= {_plain(alias): PROFILES[name] for alias, name in ALIASES.items()}
    found = known.get(wanted) or known.get(_plain(re.sub(r"[ -]\d+ ?GB.*$", "", device, flags=re.IGNORECASE)))
    if found is None:
        near = difflib.get_close_matches(wanted, known, 1)
        hint = f"; the nearest is {known[near[0]].name!r}" if near else ""
        raise OptionError(
            f"device={device!r} is not known{hint}; known are {listed(PROFILES)}. For another one give an "
            "encore.devices.DeviceProfile"
        )
    return found


def _plain(name: str) -> str:
    return re.sub(r"NVIDIA|GEFORCE|TESLA|[^A-Z0-9]", "", name.upper())
