"""The devices that this process uses, their memory and their generators, through `torch.accelerator` where it has a
call, and `torch.cuda` where it has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from encore.devices.kinds import KINDS, kind_of


def is_here(device: str | torch.device) -> bool:
    """Return whether this process can run operators on a device."""
    kind = kind_of(device)
    return kind == "cpu" or (kind in KINDS and kind == "cuda" and torch.cuda.is_available())


def devices_in_use() -> list[torch.device]:
    """The accelerators that this process has begun to use; none before its first tensor on one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def device_names() -> tuple[str, ...]:
    """The names of all CUDA devices of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.cuda.get_device_name(index) for index in range(count))


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA device that is here; None of any other."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None and is_here(device) else None


def processors(device: torch.device) -> int:
    """The streaming multiprocessors of a CUDA device that is here; 1 for any other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if is_here(device) else 1


def synchronize(device: str | torch.device | None = None) -> None:
    """Wait for a device; for all that are in use, if none is given."""
    devices = devices_in_use() if device is None else [torch.device(device)]
    for each in devices:
        if each.type != "cpu":
            torch.accelerator.synchronize(each)


def free_bytes(device: str | torch.device, *, cached: bool = False) -> int:
    """The free bytes of an accelerator; with those that the allocator has cached, if asked for."""
    free, _ = torch.accelerator.get_memory_info(torch.device(device))
    if cached:
        free += torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return free


def memory_segments(index: int) -> list[dict[str, Any]]:
    """The segments that PyTorch has reserved on a CUDA device, as it describes them."""
    return [one for one in torch.cuda.memory_snapshot(include_traces=False) if one["device"] == index]


def default_generator(device: str | torch.device) -> torch.Generator:
    """The generator that draws on a device use."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def default_generators() -> list[torch.Generator]:
    """Those of the CPU and of all accelerators in use."""
    return [torch.default_generator, *(default_generator(device) for device in devices_in_use())]


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the states of the default generators at the end."""
    states = [(generator, generator.get_state()) for generator in default_generators()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
