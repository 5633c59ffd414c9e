"""Tiers on streams that are threads, with copies that take effect late: what is loaded is what was stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encore.tiers import Disk, Host, Tier
from nullcuda.noted_tiers import NotedTiers
from nullcuda.null_device import counted, counts, device_with, late_fill, watched

BYTES = 1 << 16
LARGE = 48 << 20
LATE = 20_000
"""Microseconds after which a kernel writes."""


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    with device_with(streams=1, copy_us=5_000), Host() if request.param == "host" else Disk(tmp_path) as opened:
        yield opened


def on_streams(device: str) -> list[Any]:
    return [torch.accelerator.current_stream(device), torch.Stream(device)]


def filled(number: int, device: str = "cuda") -> torch.Tensor:
    """A tensor that is computed late, on the current stream."""
    x = torch.empty(BYTES, dtype=torch.uint8, device=device)
    late_fill(x, number, LATE)
    return x


def read(x: torch.Tensor) -> set[int]:
    """The numbers in it, for what comes next on the current stream."""
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    there.copy_(x, non_blocking=True)
    torch.accelerator.current_stream(x.device).synchronize()
    return set(there.tolist())


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_a_parcel_comes_back_as_it_was_stored(tier: Tier, device: str, side: bool) -> None:
    with torch.accelerator.device_index(torch.device(device).index), on_streams(device)[side]:
        for number in range(1, 6):
            x = filled(number, device)
            parcel = tier.store([x])
            del x
            tier.wait_for(parcel)
            late_fill(torch.empty(BYTES, dtype=torch.uint8, device=device), 99, LATE)  # takes the memory that was freed
            assert tier.prefetch(parcel)
            (loaded,) = tier.load(parcel)
            assert read(loaded) == {number}
            del loaded
            tier.free(parcel)


def test_a_tensor_of_another_device_than_the_current_one(tier: Tier) -> None:
    with torch.accelerator.device_index(1):
        x = filled(7, "cuda:1")
    parcel = tier.store([x])
    del x
    tier.wait_for(parcel)
    (loaded,) = tier.load(parcel)
    assert loaded.device == torch.device("cuda:1")
    with torch.accelerator.device_index(1):
        assert read(loaded) == {7}


def test_memory_is_not_loaded_into_while_kernels_still_use_it(tier: Tier) -> None:
    with torch.Stream("cuda"):
        parcel = tier.store([filled(3)])
        tier.wait_for(parcel)
        late_fill(torch.empty(BYTES, dtype=torch.uint8, device="cuda"), 50, 5 * LATE)  # freed, and not yet written
        (loaded,) = tier.load(parcel)
        assert read(loaded) == {3}


def test_a_load_that_nobody_takes_is_freed_behind_its_copy() -> None:
    with device_with(streams=1, copy_us=50_000), Host() as tier:
        parcel = tier.store([filled(3)])
        tier.wait_for(parcel)
        tier.prefetch(parcel)
        tier.free(parcel)
        del parcel
        x = torch.empty(BYTES, dtype=torch.uint8, device="cuda")  # the memory of the load
        late_fill(x, 9, 0)
        torch.cuda.synchronize()
        assert read(x) == {9}


def test_a_pinned_block_is_written_again_only_when_its_load_has_read_it() -> None:
    with device_with(streams=1, copy_us=20_000), Host() as tier:
        taken = []
        for number in range(1, 9):
            parcel = tier.store([filled(number)])
            tier.wait_for(parcel)
            taken += tier.load(parcel)
            tier.free(parcel)
        assert [read(x) for x in taken] == [{number} for number in range(1, 9)]
        assert counts().pinned > 0


def test_the_host_tier_waits_on_the_device_alone_and_reserves_nothing_aside() -> None:
    with device_with(streams=1), Host() as tier:
        tensors = [torch.empty(8 << 20, dtype=torch.uint8, device="cuda") for _ in range(6)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()

        def there_and_back() -> None:
            parcels = []
            for position in range(6):
                parcels.append(tier.store([tensors[position]]))
                tensors[position] = torch.empty(0)
                tier.wait_for(parcels[-1])
            for position, parcel in enumerate(parcels):
                tier.prefetch(parcel)
                tensors[position : position + 1] = tier.load(parcel)
                tier.free(parcel)

        assert counted(there_and_back).syncs == 0
        assert torch.cuda.memory_reserved() == before


def test_copies_run_next_to_kernels() -> None:
    """By the device's clock: four stores and four loads, while the stream that computes is busy."""
    with Host() as tier:
        tensors = [torch.empty(BYTES, dtype=torch.uint8, device="cuda") for _ in range(4)]
        x = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
        with device_with(copy_us=100), watched() as seen:
            parcels = [tier.store([tensor]) for tensor in tensors]
            late_fill(x, 1, 1000)
            for parcel in parcels:
                tier.wait_for(parcel)
                tier.prefetch(parcel)
            late_fill(x, 1, 1000)
            for parcel in parcels:
                tier.load(parcel)
            late_fill(x, 1, 1000)
            assert 3000 <= seen.microseconds <= 3020  # some of the host's queries
            assert seen.races == []


def test_copies_of_the_disk_tier_are_behind_no_kernel_of_another_stream(tmp_path: Path) -> None:
    with NotedTiers().disk(tmp_path) as tier, device_with(copy_us=100), watched() as seen:
        tensors = [torch.empty(BYTES, dtype=torch.uint8, device="cuda") for _ in range(4)]
        late_fill(torch.empty(BYTES, dtype=torch.uint8, device="cuda"), 1, 1000)
        with torch.Stream("cuda"):
            parcels = [tier.store([tensor]) for tensor in tensors]
            tier.wait()
            for parcel in parcels:
                tier.load(parcel)
        assert seen.microseconds == 1000
        assert seen.races == []


def test_a_parcel_of_two_devices(tier: Tier) -> None:
    with watched() as seen:
        parcel = tier.store([filled(3, "cuda:0"), filled(4, "cuda:1")])
        tier.wait_for(parcel)
        for device in ("cuda:0", "cuda:1"):
            late_fill(torch.empty(BYTES, dtype=torch.uint8, device=device), 99, LATE)
        loaded = tier.load(parcel)
        assert [str(x.device) for x in loaded] == ["cuda:0", "cuda:1"]
        assert [read(x) for x in loaded] == [{3}, {4}]
        assert seen.races == []


def test_a_load_that_is_out_of_memory_can_be_repeated(tier: Tier) -> None:
    parcel = tier.store([torch.empty(LARGE, dtype=torch.uint8, device="cuda")])
    tier.wait_for(parcel)
    torch.accelerator.synchronize()
    tier.ready(0)
    torch.accelerator.empty_cache()
    with device_with(streams=1, capacity=4 << 20):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                tier.load(parcel)
    (loaded,) = tier.load(parcel)
    assert loaded.nbytes == LARGE


def of_side_streams() -> set[int]:
    """The addresses of what is reserved for other streams than the default one."""
    return {segment["address"] for segment in torch.cuda.memory_snapshot() if segment["stream"] != 0}


@pytest.mark.parametrize("layout", ["transposed", "channels last", "plain"])
def test_dense_tensors_are_copied_without_memory_of_the_side_streams(tier: Tier, layout: str) -> None:
    x = torch.arange(2.0 * 3 * 64 * 64).view(2, 3, 64, 64)
    x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x.mT if layout == "transposed" else x
    there = x.cuda()
    assert there.stride() == x.stride()
    before = of_side_streams()
    parcel = tier.store([there])
    tier.wait_for(parcel)
    del there
    (loaded,) = tier.load(parcel)
    assert of_side_streams() <= before
    assert loaded.stride() == x.stride()
    assert torch.equal(loaded.cpu(), x)
