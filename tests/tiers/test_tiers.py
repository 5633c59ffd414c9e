"""What goes into a tier comes back: the same bits, shapes and strides, however many go in at once."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from encore.errors import OptionError, TierError
from encore.tiers import Disk, Host, Tier, open_tiers
from encore.tiers.layout import LINE, layout_of
from encore.tiers.tier import Block

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8]


@pytest.fixture(params=["disk", "disk, buffered", "host"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier = Host() if request.param == "host" else Disk(tmp_path, direct=request.param == "disk")
    with made:
        yield made


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype) if dtype in (torch.bool,) else (torch.randn(shape) * 100).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_comes_back(tier: Tier, dtype: torch.dtype) -> None:
    tensors = [some(3, 5, dtype=dtype), some(dtype=dtype), some(0, 4, dtype=dtype), some(7, dtype=dtype)[2:]]
    parcel = tier.store(tensors)
    tier.wait()
    assert all(map(same, tensors, tier.load(parcel)))
    assert all(map(same, tensors, tier.load(parcel))), "a parcel may be loaded again"


def test_strides_gaps_and_places_come_back(tmp_path: Path) -> None:
    gates = some(4, 40)
    tensors = [
        gates[:, 10:20],
        gates.t(),
        some(1, 6).expand(5, 6),
        some(2, 3, 4, 5).permute(0, 2, 3, 1),
        gates[::2, 3::7],
    ]
    with Disk(tmp_path) as tier:
        parcel = tier.store(tensors)
        tier.wait()
        for before, after in zip(tensors, tier.load(parcel), strict=True):
            assert same(before, after)
            assert before.data_ptr() % LINE == after.data_ptr() % LINE
    assert layout_of([some(1, 64).expand(100, 64)]).bytes == 256, "what is expanded is packed once"


def test_a_tensor_that_occurs_twice_comes_back_as_one(tier: Tier) -> None:
    twice, other = some(8), some(8)
    parcel = tier.store([twice, other, twice, twice[:4]])
    tier.wait()
    first, second, third, part = tier.load(parcel)
    assert first is third
    assert torch.equal(second, other)
    assert torch.equal(part, twice[:4])
    assert parcel.bytes < 5 * LINE


def test_a_new_tensor_in_old_memory_is_another_parcel(tmp_path: Path) -> None:
    """Allocators hand the same address out again; a key made of addresses would mix these up."""
    with Disk(tmp_path) as tier:
        parcels = [tier.store([torch.full((1000,), float(number))]) for number in range(50)]
        tier.wait()
        for number, parcel in enumerate(parcels):
            assert tier.load(parcel)[0].eq(number).all()


def test_a_freed_slot_is_used_again(tmp_path: Path) -> None:
    with Disk(tmp_path, capacity=1 << 16) as tier:
        for number in range(200):
            parcel = tier.store([torch.full((4096,), float(number))])
            assert tier.load(parcel)[0].eq(number).all()
            tier.free(parcel)
    with pytest.raises(TierError, match="closed"):
        tier.load(parcel)


def test_what_was_prefetched_is_there(tmp_path: Path) -> None:
    with Disk(tmp_path, depth=2) as tier:
        parcels = [tier.store([torch.full((100,), float(number))]) for number in range(5)]
        tier.wait()
        assert [tier.prefetch(parcel) for parcel in parcels] == [True, True, False, False, False], "bounded by depth"
        assert tier.prefetch(parcels[0]), "once is enough"
        assert [tier.load(parcel)[0][0].item() for parcel in parcels] == [0, 1, 2, 3, 4]
        assert tier.prefetch(parcels[3])
        tier.free(parcels[3])
        assert tier.prefetch(parcels[4])
        assert tier.load(parcels[4])[0][0] == 4


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["store", "prefetch", "load", "free"]), st.integers(0, 7)), max_size=40))
def test_any_order_of_calls(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    stored = {}
    with Disk(tmp_path, depth=2) as tier:
        for position, (call, number) in enumerate(calls):
            if call == "store":
                stored[number] = tier.store([torch.full((number * 700,), float(position))]), position
            elif number in stored:
                parcel, value = stored[number]
                if call == "prefetch":
                    tier.prefetch(parcel)
                elif call == "load":
                    assert tier.load(parcel)[0].eq(value).all()
                else:
                    tier.free(parcel)
                    del stored[number]


def test_two_threads_share_a_tier(tier: Tier) -> None:
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for turn in range(50):
                parcel = tier.store([torch.full((500,), float(number * 1000 + turn))])
                tier.prefetch(parcel)
                assert tier.load(parcel)[0].eq(number * 1000 + turn).all()
                tier.free(parcel)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    assert not failures


def test_two_threads_load_one_parcel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes the tensors with it, and the second waits for others."""
    go = threading.Event()
    preadv = os.preadv
    found: list[torch.Tensor] = []
    with Disk(tmp_path) as tier:
        parcel = tier.store([torch.arange(100.0)])
        tier.wait()
        monkeypatch.setattr(os, "preadv", lambda *arguments: (go.wait(30), preadv(*arguments))[1])
        threads = [threading.Thread(target=lambda: found.extend(tier.load(parcel))) for _ in range(3)]
        for thread in threads:
            thread.start()
        while tier.transfers.loads < 3:
            time.sleep(0.001)
        go.set()
        for thread in threads:
            thread.join(30)
        assert [tensor.sum().item() for tensor in found] == [4950.0] * 3
        assert len({tensor.data_ptr() for tensor in found}) == 3


def test_what_is_abandoned_is_freed_with_the_next_call(tier: Tier) -> None:
    parcels = [tier.store([torch.zeros(2000)]) for _ in range(3)]
    tier.wait()
    tier.free(parcels[0])
    for parcel in parcels:
        tier.abandon(parcel)
    assert tier.has_room(8000)
    for parcel in parcels:
        with pytest.raises(TierError, match="was freed"):
            tier.load(parcel)
    if isinstance(tier, Disk):
        claimed = tier._file.claimed
        for _ in range(100):
            tier.abandon(tier.store([torch.zeros(2000)]))
            tier.wait()
        assert tier._file.claimed == claimed
        assert tier._file._end <= 4 * 8192
    else:
        assert isinstance(tier, Host)
        assert tier.used == 0


def test_host_memory_comes_back_ahead_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded as it would be on a GPU, whose copies are left out."""
    with Host(depth=2) as tier:
        parcels = [tier.store([torch.full((3,), float(number))]) for number in range(4)]

        def fetch(block: Block) -> None:
            block.tensors, block.loading = [torch.zeros(3)], False

        monkeypatch.setattr(tier, "_fetch", fetch)
        for parcel in parcels:
            parcel.block.stored, parcel.block.tensors = True, None
        assert [tier.prefetch(parcel) for parcel in parcels] == [True, True, False, False]
        assert tier.prefetch(parcels[0]), "once is enough"
        tier.free(parcels[0])
        assert tier.prefetch(parcels[2])
        assert not tier.prefetch(parcels[3])


def test_a_full_host_says_so() -> None:
    with Host(capacity=1000) as tier:
        parcel = tier.store([torch.zeros(200)])
        assert not tier.has_room(400)
        with pytest.raises(TierError, match=r"no room for 832 B more; give it more.*tiers=\('host', 'disk'\)"):
            tier.store([torch.zeros(200)])
        tier.free(parcel)
        tier.store([torch.zeros(200)])


def test_parcels_know_their_tier(tmp_path: Path) -> None:
    with Disk(tmp_path) as one, Disk(tmp_path) as other:
        parcel = one.store([torch.zeros(3)])
        with pytest.raises(TierError, match="another tier"):
            other.load(parcel)
        one.free(parcel)
        with pytest.raises(TierError, match="was freed"):
            one.load(parcel)


def test_names() -> None:
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(Host())
        opened = open_tiers(("disk", mine), stack)
        assert [tier.name for tier in opened] == ["disk", "host"]
        assert opened[1] is mine
        with pytest.raises(OptionError, match="'disk', 'host'"):
            open_tiers("tape", stack)


def test_sparse_tensors_are_refused(tmp_path: Path) -> None:
    with Disk(tmp_path) as tier, pytest.raises(TierError, match="to_dense"):
        tier.store([torch.eye(3).to_sparse()])


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_tensors_of_other_devices_are_refused(tier: Tier, device: str) -> None:
    with FakeTensorMode():
        x = torch.empty(4, device=device)
    with pytest.raises(TierError, match=rf"CPUs and CUDA devices, not of {device}:0, .*leave out tiers="):
        tier.store([x])


def test_nothing_is_left_when_it_is_forgotten(tmp_path: Path) -> None:
    before = threading.active_count()
    tier = Disk(tmp_path)
    tier.store([torch.zeros(5000)])
    assert not list(tmp_path.iterdir()), "the file has no name from the first moment on"
    del tier
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("encore-disk"):
            thread.join(10)
    assert threading.active_count() <= before


def test_nothing_is_left_when_it_is_killed_and_forks_are_refused(tmp_path: Path) -> None:
    program = """
import os, signal, sys, torch
from encore.errors import TierError
from encore.tiers import Disk
tier = Disk(sys.argv[1])
parcel = tier.store([torch.zeros(10)])
child = os.fork()
if child == 0:
    try:
        tier.load(parcel)
    except TierError as error:
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(1)
if os.waitpid(child, 0)[1] != 0:
    sys.exit(1)
for _ in range(20):
    tier.store([torch.zeros(100_000)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=300)
    assert found.returncode == -9
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("direct", [False, True])
def test_the_file_has_no_name_for_a_moment_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except (OSError, AttributeError):
        pytest.skip("no files without names here")

    def named(**_: object) -> None:
        raise AssertionError("it had a name")

    monkeypatch.setattr(tempfile, "mkstemp", named)
    with Disk(tmp_path, direct=direct) as tier:
        assert tier.load(tier.store([torch.ones(3)]))[0].sum() == 3
        assert tier.direct <= direct


@pytest.mark.parametrize("direct", [False, True])
def test_file_systems_that_name_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    opened = os.open

    def refuse(path: object, flags: int, *more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "refused")
        return opened(path, flags, *more)  # type: ignore[arg-type]

    with Disk(tmp_path, direct=direct) as tier:
        expected = tier.direct
    monkeypatch.setattr(os, "open", refuse)
    with Disk(tmp_path, direct=direct) as tier:
        assert tier.direct == expected
        assert not list(tmp_path.iterdir())
        assert tier.load(tier.store([torch.ones(3)]))[0].sum() == 3


def test_the_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TierError, match=r"no folder '.*nowhere' for the disk tier; make it"):
        Disk(tmp_path / "nowhere")
    monkeypatch.setenv("ENCORE_TIER_DIR", str(tmp_path / "neither"))
    with pytest.raises(TierError, match="neither"):
        Disk()
    monkeypatch.setenv("ENCORE_TIER_DIR", str(tmp_path))
    with Disk() as tier:
        opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert any(path.startswith(str(tmp_path)) and "(deleted)" in path for path in opened)
        assert tier.load(tier.store([torch.ones(3)]))[0].sum() == 3


def test_room_that_is_free_again_holds_other_sizes(tmp_path: Path) -> None:
    with Disk(tmp_path, capacity=1 << 20) as tier:
        for numbers in (1 << 14, 1 << 17, 3000):
            count = (1 << 20) // (-(-4 * numbers // 4096) * 4096)
            assert tier.has_room(4 * numbers, count)
            assert not tier.has_room(4 * numbers, count + 1)
            parcels = [tier.store([torch.full((numbers,), float(number))]) for number in range(count)]
            tier.wait()
            assert not tier.has_room(4 * numbers)
            assert tier.load(parcels[-1])[0].unique().item() == count - 1
            for parcel in parcels:
                tier.free(parcel)


def test_two_tensors_with_one_memory_stay_two(tmp_path: Path) -> None:
    h = some(3, 4)
    with Disk(tmp_path) as tier:
        parcel = tier.store([h, h.detach(), h])
        tier.wait()
        first, second, third = tier.load(parcel)
        assert first is third
        assert first is not second
        assert torch.equal(first, second)
