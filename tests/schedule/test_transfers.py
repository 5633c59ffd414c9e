"""Stores and loads beside operators: never over the peak, in order, legal, exact; their stall by a second clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from encore.codecs import CODECS
from encore.errors import IllegalGraphError
from encore.fates import Encode, Fate, Link, Offload, Recompute, code_bytes, fills_its_memory, owned, recomputable
from encore.graph import Graph, Op, OpClass, Role, Storage, Value, verify_graph
from encore.graph.tier_ops import StoreTo
from encore.graph.values import Ref
from encore.lower import Transport, lower
from encore.schedule import (
    Action,
    Free,
    Fused,
    Load,
    Run,
    Schedule,
    Store,
    Wait,
    carry_out,
    fuse,
    place_transfers,
    replay,
    schedule_step,
    simulate,
)
from encore.schedule.transfers import Transfer, place_loads, place_stores
from encore.tiers import Disk
from support.captured_graphs import captured
from support.mask_models import Gated, Pictures

SLOW = Link(store=1e-8, load=2e-8, call=1e-5, pace=0.9, depth=8)


def a_microsecond(graph: Graph, op: Op | Fused, over: int | None) -> float:
    return 1e-6


def movable(graph: Graph) -> list[int]:
    return [value for value in sorted(owned(graph)) if fills_its_memory(graph, graph.values[value])]


def drawn_fates(graph: Graph, seed: int) -> list[Fate]:
    """Some values to the disk, some of them as codes, some recomputed."""
    draw = random.Random(seed)
    values = movable(graph)
    moved = draw.sample(values, k=max(1, len(values) * (seed % 3 + 1) // 4))
    codes = dict[int, Encode]()
    for value in moved[::2]:
        sizes = {name: code_bytes(graph, value, codec) for name, codec in CODECS.items() if codec.exact_size}
        lossless = [Encode(value, name, size) for name, size in sizes.items() if size and CODECS[name].lossless]
        codes.update((value, code) for code in lossless[:1])
    others = sorted(recomputable(graph) - set(moved))
    again = draw.sample(others, k=len(others) * (seed % 4) // 4)
    return [*map(Recompute, again), *(Offload(value, "disk", codes.get(value)) for value in moved)]


def gradients_of(schedule: Schedule, transport: Transport | None, primals: Sequence[Any]) -> list[Any]:
    graph = schedule.graph
    lowered = lower(schedule, transports={"disk": transport} if transport else {})
    torch.manual_seed(7)
    outputs = lowered.forward([primal.detach() for primal in primals])
    saved = list(outputs[len(graph.outputs) :])
    tangents = [torch.ones(graph.values[value].shape) for value in graph.tangents]
    return list(lowered.backward([*saved, *tangents]))


def moving(schedule: Schedule) -> list[Action]:
    actions = (*schedule.forward, *schedule.backward)
    return [action for action in actions if isinstance(action, Store | Load | Wait)]


def stored_bytes(schedule: Schedule) -> list[int]:
    graph = schedule.graph
    return [graph.bytes_of(graph.ops[action.op].reads[0]) for action in schedule.forward if isinstance(action, Store)]


@pytest.mark.parametrize("model", [Gated(2, 16), Pictures(4)], ids=["gated", "pictures"])
@pytest.mark.parametrize("seed", range(6))
def test_any_choice_gives_a_legal_step_with_the_same_gradients(tmp_path: Path, model: nn.Module, seed: int) -> None:
    x = torch.randn(32, 16) if isinstance(model, Gated) else torch.randn(2, 3, 16, 16)
    graph = captured(model, x).unplanned.schedule.graph
    fates = drawn_fates(graph, seed)
    changed = carry_out(graph, fates, exact=True)
    verify_graph(changed)
    together = schedule_step(changed)
    gone = {changed.values[fate.value].storage for fate in fates}
    assert not gone.intersection(changed.values[value].storage for value in together.saved)
    peak = simulate(together).step_peak
    link = dataclasses.replace(SLOW, depth=seed + 2)
    for schedule in (together, fuse(together)):
        timeline = simulate(schedule)
        placed = place_transfers(schedule, timeline, a_microsecond, {"disk": link})
        assert simulate(placed.schedule).step_peak <= timeline.step_peak
        assert replay(placed.schedule, limit=timeline.step_peak) <= timeline.step_peak
        assert len(moving(placed.schedule)) == 4 * len(stored_bytes(placed.schedule))
        assert placed.moved == sum(stored_bytes(placed.schedule))
    primals = [
        torch.zeros(value.shape).long() if value.dtype is torch.int64 else torch.rand(value.shape)
        for value in (graph.values[number] for number in graph.primals)
    ]
    wanted = gradients_of(schedule_step(graph), None, primals)
    beside = place_transfers(together, simulate(together), a_microsecond, {"disk": link}).schedule
    assert simulate(beside).step_peak <= peak
    with Disk(tmp_path, workers=1, depth=64) as disk:
        transport = Transport(disk)
        for schedule in (together, beside, beside):
            found = gradients_of(schedule, transport, primals)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None)
        transport.prepare(())
        assert disk.transfers.stores == disk.transfers.loads == 3 * len(stored_bytes(beside))
        assert transport.parcels == 0


# -- where transfers begin and end -----------------------------------------------------------------------------------


def room(*sizes: int) -> Any:
    return np.array(sizes, dtype=np.int64)


def test_a_store_is_waited_for_where_its_bytes_are_needed() -> None:
    seconds = [1.0] * 6
    assert place_stores(room(9, 9, 9, 9, 4, 9), seconds, [Transfer(1, 5, 2.5)], 8, 1.0) == ([4], 0.0, 0.0)
    assert place_stores(room(9, 9, 4, 9, 9, 9), seconds, [Transfer(1, 5, 2.5)], 8, 1.0) == ([2], 1.5, 0.0)


def test_a_store_that_must_be_over_is_waited_for() -> None:
    assert place_stores(room(*[9] * 9), [1.0] * 9, [Transfer(1, 5, 2.0)], 8, 1.0) == ([5], 0.0, 0.0)


def test_what_is_left_is_waited_for_at_the_end() -> None:
    stores = [Transfer(1, 5, 2.0), Transfer(2, 5, 2.0)]
    assert place_stores(room(20, 20, 20), [1.0] * 3, stores, 8, 1.0) == ([3, 3], 2.0, 0.0)


def test_a_full_queue_waits_for_its_oldest() -> None:
    stores = [Transfer(1, 5, 2.0), Transfer(1, 5, 2.0)]
    assert place_stores(room(20, 20, 20), [1.0] * 3, stores, 2, 1.0) == ([1, 3], 4.0 - 1.0 - 1.0, 0.0)


def test_a_load_begins_as_soon_as_there_is_room_until_it_is_read() -> None:
    seconds = [1.0] * 6
    assert place_loads(room(9, 9, 9, 9, 9, 0), seconds, [Transfer(4, 5, 2.5)], 8, 1.0) == ([0], 0.0, 0.0)
    assert place_loads(room(9, 4, 9, 9, 9, 0), seconds, [Transfer(4, 5, 2.5)], 8, 1.0) == ([2], 0.5, 0.0)
    assert place_loads(room(9, 9, 9, 4, 9, 0), seconds, [Transfer(4, 5, 2.5)], 8, 1.0) == ([4], 2.5, 0.0)


def test_loads_share_the_room_and_the_channel() -> None:
    loads = [Transfer(2, 5, 1.5), Transfer(4, 5, 1.5)]
    assert place_loads(room(9, 9, 9, 9, 9), [1.0] * 5, loads, 8, 1.0) == ([0, 2], 0.0, 0.0)
    assert place_loads(room(19, 19, 19, 19, 19), [1.0] * 5, loads, 8, 1.0) == ([0, 0], 0.0, 0.0)
    assert place_loads(room(19, 19, 19, 19, 19), [1.0] * 5, loads, 1, 1.0) == ([0, 3], 0.5, 0.0)


def after(seconds: float, clock: float, channel: float, pace: float) -> float:
    """When an action is over that begins now, beside a channel which is busy for a while."""
    busy = max(0.0, channel - clock)
    return clock + seconds / pace if seconds / pace <= busy else clock + busy + seconds - busy * pace


transfers = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.floats(0.1, 5)), min_size=1, max_size=8)
rooms = st.lists(st.integers(0, 60), min_size=10, max_size=10)
times = st.lists(st.floats(0, 3), min_size=10, max_size=10)


@settings(deadline=None)
@given(rooms, times, transfers, st.integers(1, 5), st.sampled_from([0.5, 1.0]))
def test_stores_keep_to_the_room_and_stall_as_a_second_clock_says(
    left: list[int], seconds: list[float], drawn: list[tuple[int, int, float]], depth: int, pace: float
) -> None:
    stores = [Transfer(*one) for one in sorted(drawn, key=lambda one: one[0])]
    waits, stall, lost = place_stores(room(*left), seconds, stores, depth, pace)
    assert waits == sorted(waits)
    for place in range(10):
        flying = [store for store, wait in zip(stores, waits, strict=True) if store.place <= place < wait]
        assert sum(store.size for store in flying) <= left[place]
        assert len(flying) < depth
    clock = channel = 0.0
    over: dict[int, float] = {}
    for place in range(11):
        for number, store in enumerate(stores):
            if store.place == place:
                over[number] = channel = max(channel, clock) + store.seconds
        for number, wait in enumerate(waits):
            if wait == place:
                clock = max(clock, over[number])
        clock = after(seconds[place] if place < 10 else 0.0, clock, channel, pace)
    assert clock == pytest.approx(sum(seconds) + stall + lost)


@settings(deadline=None)
@given(rooms, times, transfers, st.integers(1, 5), st.sampled_from([0.5, 1.0]))
def test_loads_keep_to_the_room_and_stall_as_a_second_clock_says(
    left: list[int], seconds: list[float], drawn: list[tuple[int, int, float]], depth: int, pace: float
) -> None:
    loads = [Transfer(*one) for one in sorted(drawn, key=lambda one: one[0])]
    begins, stall, lost = place_loads(room(*left), seconds, loads, depth, pace)
    assert begins == sorted(begins)
    for place in range(10):
        flying = [load for load, begin in zip(loads, begins, strict=True) if begin <= place < load.place]
        assert sum(load.size for load in flying) <= left[place] or not flying
        assert len(flying) <= depth
    clock = channel = 0.0
    over: dict[int, float] = {}
    for place in range(10):
        for number, load in enumerate(loads):
            if begins[number] == place:
                over[number] = channel = max(channel, clock) + load.seconds
        for number, load in enumerate(loads):
            if load.place == place:
                clock = max(clock, over[number])
        clock = after(seconds[place], clock, channel, pace)
    assert clock == pytest.approx(sum(seconds) + stall + lost)


# -- what the replayer rejects ---------------------------------------------------------------------------------------


def one_moved() -> Schedule:
    graph = captured(Gated(2, 16), torch.randn(32, 16)).unplanned.schedule.graph
    schedule = schedule_step(carry_out(graph, [Offload(movable(graph)[1], "disk")], exact=True))
    return place_transfers(schedule, simulate(schedule), a_microsecond, {"disk": SLOW}).schedule


def without(kind: type) -> Callable[[list[Action]], list[Action]]:
    return lambda actions: [action for action in actions if not isinstance(action, kind)]


def waits_last(actions: list[Action]) -> list[Action]:
    return without(Wait)(actions) + [action for action in actions if isinstance(action, Wait)]


def waits_twice(actions: list[Action]) -> list[Action]:
    return [one for action in actions for one in [action] * (2 if isinstance(action, Wait) else 1)]


def never_freed(actions: list[Action]) -> list[Action]:
    """What is stored is neither waited for nor forgotten."""
    waits = [place for place, action in enumerate(actions) if isinstance(action, Wait)]
    return [action for place, action in enumerate(actions) if place not in waits and place - 1 not in waits]


@pytest.mark.parametrize(
    ("phase", "spoil", "why"),
    [
        ("forward", without(Wait), "is forgotten while it is being moved"),
        ("forward", without(Store), "a wait for .* which has not begun"),
        ("forward", waits_twice, "a wait for .* which has not begun"),
        ("forward", never_freed, "before .*_store is waited for"),
        ("backward", without(Load), "a wait for .* which has not begun"),
        ("backward", waits_last, "whose bytes have not been waited for"),
    ],
)
def test_a_spoilt_schedule_is_rejected(phase: str, spoil: Callable[[list[Action]], list[Action]], why: str) -> None:
    schedule = one_moved()
    replay(schedule)
    with pytest.raises(IllegalGraphError, match=why):
        replay(dataclasses.replace(schedule, **{phase: tuple(spoil(list(getattr(schedule, phase))))}))  # type: ignore[arg-type]


def test_a_write_over_what_is_being_stored_is_rejected() -> None:
    storages = [Storage(number, 64, "cpu", [number]) for number in range(4)]
    values = [
        Value(number, name, number, (16,), (1,), torch.float32, 64, number - 1 if number else None)
        for number, name in enumerate(["x", "made", "token", "over"])
    ]
    values[0].role, values[0].readers, values[1].readers = Role.INPUT, [0], [1, 2]
    targets = (torch.ops.aten.tanh.default, StoreTo("disk"), torch.ops.aten.neg.default)
    ops = [
        Op(number, name, target, (Ref(read),), {}, (read,), (number + 1,), False, OpClass.CHEAP, "", "")
        for number, (name, target, read) in enumerate(zip(("tanh", "store", "neg"), targets, (0, 1, 1), strict=True))
    ]
    graph = Graph(values, storages, ops, [0], [], [3], [None])
    ends = (Free(1), Free(2))
    late = (Run(0), Free(0), Store(1), Run(2, over=1), Wait(1), *ends)
    with pytest.raises(IllegalGraphError, match="neg writes over made, which is being moved"):
        replay(Schedule(graph, late, (), ()))
    replay(Schedule(graph, (Run(0), Free(0), Store(1), Wait(1), Run(2, over=1), *ends), (), ()))


def test_a_placed_schedule_reads_aloud() -> None:
    lines = [line.strip() for line in one_moved().describe().splitlines()]
    assert [line.split()[0] for line in lines if line.split()[0] in ("store", "wait", "load")] == [
        "store", "wait", "load", "wait"
    ]  # fmt: skip
