"""What CUDA's caching allocator reserves, against its rules worked out by hand, and against what must always hold."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from encore.devices import CachingAllocator, DeviceBlock
from encore.devices.caching_allocator import rounded

MIB = 1 << 20


def test_small_blocks_share_a_segment_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(1), allocator.allocate(600)
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)
    assert first is not None
    assert second is not None
    assert second.address == first.address + 512


def test_medium_blocks_share_a_segment_of_twenty_mebibytes_and_large_ones_have_their_own() -> None:
    allocator = CachingAllocator()
    allocator.allocate(2 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(10 * MIB)  # 9 MiB are left in the first
    assert allocator.reserved == 30 * MIB
    allocator.allocate(11 * MIB + 1)
    assert allocator.reserved == 42 * MIB


def test_a_large_block_is_split_only_where_more_than_a_mebibyte_remains() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(11 * MIB)
    assert allocator.allocated == 12 * MIB
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(14 * MIB))
    allocator.allocate(12 * MIB)
    assert allocator.allocated == 12 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 14 * MIB


def test_freed_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 20 * MIB


def test_fragments_cannot_serve_a_larger_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(8 * MIB)
    assert (allocator.allocated, allocator.reserved) == (18 * MIB, 40 * MIB)


def test_segments_go_back_where_the_device_has_no_room() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    kept = allocator.allocate(30 * MIB)  # from the block of 40
    assert allocator.reserved == 40 * MIB
    allocator.free(kept)
    allocator.allocate(50 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (50 * MIB, 50 * MIB)
    assert not allocator.ran_out
    allocator.allocate(20 * MIB)
    assert allocator.ran_out


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 40 * MIB))


@given(st.lists(st.tuples(sizes, st.integers(0, 1 << 30)), max_size=60))
def test_blocks_never_overlap_and_everything_comes_back(program: list[tuple[int, int]]) -> None:
    allocator, used = CachingAllocator(), list[DeviceBlock]()
    for size, chosen in program:
        if chosen % 3 == 0 and used:
            allocator.free(used.pop(chosen % len(used)))
        else:
            block = allocator.allocate(size)
            assert block is not None
            assert block.size >= rounded(size)
            used.append(block)
        assert allocator.allocated == sum(block.size for block in used) <= allocator.reserved
        ordered = sorted(used, key=lambda block: block.address)
        assert all(a.address + a.size <= b.address for a, b in itertools.pairwise(ordered))
    reserved = allocator.reserved
    for block in used:
        allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, reserved)
    allocator._release_segments()
    assert allocator.reserved == 0
