"""The simulated caching allocator reserves what PyTorch's own does."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encore.devices import CachingAllocator, DeviceBlock
from nullcuda.null_device import device_with

KIB, MIB = 1 << 10, 1 << 20
DEVICE = 1
"""Nothing else is allocated there."""

sizes = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(1, 30 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 10 * MIB - 1, 20 * MIB, 21 * MIB]),
)  # fmt: skip
"""Around the borders of the pools, and anywhere."""
traces = st.lists(st.one_of(sizes.map(lambda size: ("allocate", size)), st.integers(0, 30).map(lambda n: ("free", n))))


def state(device: int) -> tuple[int, int]:
    return torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)


def empty_device() -> None:
    torch.cuda.empty_cache()
    assert state(DEVICE) == (0, 0)


@settings(max_examples=100, deadline=None)
@given(traces)
def test_random_traces(trace: list[tuple[str, int]]) -> None:
    empty_device()
    simulated = CachingAllocator()
    alive: list[tuple[torch.Tensor, DeviceBlock | None]] = []
    for what, number in trace:
        if what == "allocate":
            tensor = torch.empty(number, dtype=torch.uint8, device=f"cuda:{DEVICE}")
            alive.append((tensor, simulated.allocate(number)))
            del tensor
        elif alive:
            _, block = alive.pop(number % len(alive))
            del _
            simulated.free(block)
        assert (simulated.allocated, simulated.reserved) == state(DEVICE)
    alive.clear()


@settings(max_examples=100, deadline=None)
@given(traces)
def test_random_traces_at_a_capacity(trace: list[tuple[str, int]]) -> None:
    """Where the device is full, cached segments are given back first; out of memory at the same allocation."""
    capacity = 64 * MIB
    with device_with(capacity=capacity):
        empty_device()
        simulated = CachingAllocator(capacity)
        alive: list[tuple[torch.Tensor, DeviceBlock | None]] = []
        for what, number in trace:
            if what == "allocate":
                block = simulated.allocate(number)
                try:
                    tensor = torch.empty(number, dtype=torch.uint8, device=f"cuda:{DEVICE}")
                except torch.OutOfMemoryError:
                    assert simulated.ran_out
                    break
                assert not simulated.ran_out
                alive.append((tensor, block))
                del tensor
            elif alive:
                _, block = alive.pop(number % len(alive))
                del _
                simulated.free(block)
            assert (simulated.allocated, simulated.reserved) == state(DEVICE)
        alive.clear()
