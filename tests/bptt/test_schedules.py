"""Every schedule is legal, keeps its limits, and runs as many steps as its formula says, or the optimum."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encore.bptt import revolve
from encore.bptt.actions import Action, Advance, FreeState, LoadState, Reverse, StoreState, Tape, TimeSchedule
from encore.bptt.keep import KeepTape
from encore.bptt.multistage import MeasuredPace, Multistage
from encore.bptt.online import Online
from encore.bptt.replayer import Counts, Replayer, replay
from encore.bptt.revolve import Revolve, advances_needed, beta
from encore.bptt.selection import Room, choose
from encore.errors import BudgetError, IllegalGraphError, OptionError


@functools.cache
def optimum(steps: int, slots: int) -> int:
    """Fewest runs without a tape, by trying every split."""
    if steps <= 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(cut + optimum(steps - cut, slots - 1) + optimum(cut, slots) for cut in range(1, steps))


def counted(schedule: TimeSchedule, steps: int, *, state: int = 0, tape: int = 0) -> Counts:
    """Follow a schedule whose length is known only at the end, as a scan over an iterator would."""
    replayer = Replayer(slots=schedule.slots or None, block=schedule.block, state=state, tape=tape)
    for action in schedule.forward() if steps else ():
        if isinstance(action, Advance) and action.stop > steps:
            if action.start < steps:
                replayer.follow(Advance(action.start, steps))
            break
        replayer.follow(action)
    replayer.turn(steps)
    for action in schedule.backward(steps):
        replayer.follow(action)
    return replayer.finish()


@pytest.mark.parametrize(("steps", "slots", "forwards"), [(100, 5, 416), (1000, 10, 4636), (1, 1, 1), (10, 1, 55)])
def test_published_counts(steps: int, slots: int, forwards: int) -> None:
    assert Revolve.forwards(steps, slots) == forwards
    assert counted(Revolve(steps, slots), steps).forwards == forwards


def test_formula_schedule_and_brute_force_agree() -> None:
    for steps, slots in itertools.product(range(1, 60), range(1, 9)):
        assert advances_needed(steps, slots) == optimum(steps, slots), (steps, slots)
        found = counted(Revolve(steps, slots), steps)
        assert (found.advanced, found.taped) == (optimum(steps, slots), steps), (steps, slots)


def test_no_step_runs_more_often_than_repeats_allow() -> None:
    runs = [0] * 286
    schedule = Revolve(286, 10)
    assert beta(10, 3) == 286
    for action in itertools.chain(schedule.forward(), schedule.backward(286)):
        if isinstance(action, Advance):
            for step in range(action.start, action.stop):
                runs[step] += 1
    assert max(runs) == 3


def test_a_schedule_read_aloud() -> None:
    schedule = Revolve(4, 2)
    forward: list[Action] = [StoreState(0), Advance(0, 2), StoreState(2), Advance(2, 3), Tape(3, 4)]
    assert list(schedule.forward()) == forward
    backward: list[Action] = [Reverse(3, 4), LoadState(2), FreeState(2), Tape(2, 3), Reverse(2, 3)]
    backward += [LoadState(0), Advance(0, 1), StoreState(1), FreeState(1), Tape(1, 2), Reverse(1, 2)]
    backward += [LoadState(0), FreeState(0), Tape(0, 1), Reverse(0, 1)]
    assert list(schedule.backward(4)) == backward


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 400), st.integers(1, 30), st.integers(1, 20))
def test_revolve_over_blocks(steps: int, slots: int, block: int) -> None:
    found = counted(Revolve(steps, slots, block), steps)
    assert found.taped == steps
    assert found.forwards == Revolve.forwards(steps, slots, block)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2000), st.integers(1, 40), st.integers(1, 10))
def test_online(steps: int, slots: int, block: int) -> None:
    found = counted(Online(slots, block), steps)
    assert found.taped == steps
    if steps and slots >= 4:
        known = Revolve.forwards(steps, slots, block) + block  # online, forward runs through the last block, too
        assert found.forwards <= 1.5 * known + 2 * block


class _Fickle:
    """A tier that takes its time."""

    def __init__(self, intervals: list[int], busy: list[bool]) -> None:
        self.intervals: Iterator[int] = itertools.cycle(intervals)
        self.busy: Iterator[bool] = itertools.chain(
            itertools.cycle(busy) if not all(busy) else iter(busy), itertools.repeat(False)
        )

    def interval(self) -> int:
        return next(self.intervals)

    def ready(self) -> bool:
        return not next(self.busy)


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 500), st.lists(st.integers(1, 60), min_size=1), st.lists(st.booleans(), min_size=1),
    st.integers(1, 10), st.integers(1, 10), st.booleans(),
)  # fmt: skip
def test_multistage(steps: int, intervals: list[int], busy: list[bool], slots: int, block: int, known: bool) -> None:
    pace = _Fickle(intervals, busy)
    schedule = Multistage(pace, lambda length: (slots, block), slots=slots, block=block, steps=steps if known else None)
    found = counted(schedule, steps)
    assert found.taped == steps
    assert found.most_slots <= slots
    assert found.tier_stores >= (steps > 0)


@pytest.mark.parametrize("known", [True, False])
def test_multistage_costs_two_forwards_a_step_where_tapes_fit(known: bool) -> None:
    steps, block = 10_000, 16
    pace = _Fickle([block], [False])
    schedule = Multistage(pace, lambda length: (1, block), slots=1, block=block, steps=steps if known else None)
    found = counted(schedule, steps)
    assert found.forwards == 2 * steps - (block if known else 0)
    assert found.most_slots <= 1


def test_late_states_are_counted_and_nothing_else_changes_the_runs() -> None:
    """With every state where it was planned, as many steps run as the formula says; and only then."""
    for steps, interval, block in itertools.product((1, 40, 97, 500), (1, 7, 16), (1, 4, 16)):
        room = Room(budget=None, slots=3, state=1, tape=1, work=0)
        ways = {"as planned": ([interval], [False]), "late": ([interval], [True, False])}
        ways["longer"] = [interval, 90], [False]
        for name, (intervals, busy) in ways.items():
            shape = functools.partial(room.shape, staged=True)
            schedule = Multistage(
                _Fickle(intervals, busy), shape, slots=3, block=block, steps=steps,
                planned=interval,
            )  # fmt: skip
            list(schedule.forward())
            planned = [*range(0, max(1, steps - block), interval)]
            assert (schedule.late == 0) == (schedule.stored == planned), (name, steps, interval, block)
            assert schedule.late == 0 or name != "as planned"


class _Count:
    """How often a function is called."""

    def __init__(self, function: Callable[..., int]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *arguments: int) -> int:
        self.calls += 1
        return self.function(*arguments)


MEMORIES: dict[str, dict[str, int | None]] = {
    "one slot": {"budget": None, "slots": 1, "state": 1, "tape": 1, "work": 0},
    "two slots": {"budget": None, "slots": 2, "state": 1, "tape": 1, "work": 0},
    "many slots": {"budget": None, "slots": 1000, "state": 1, "tape": 1, "work": 0},
    "one state": {"budget": 110, "slots": None, "state": 10, "tape": 1, "work": 0},
    "tapes": {"budget": 1 << 20, "slots": None, "state": 1 << 14, "tape": 1 << 9, "work": 1 << 16},
    "states": {"budget": 1 << 20, "slots": None, "state": 1 << 9, "tape": 1 << 14, "work": 1 << 16},
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["revolve", "multistage", "online"])
def test_a_million_steps_take_no_more_work_than_a_thousand(
    monkeypatch: pytest.MonkeyPatch, name: str, memory: str
) -> None:
    """Choosing, and beginning either way, evaluates binomials: so many, whatever the length."""
    counted_beta = _Count(beta)
    monkeypatch.setattr(revolve, "beta", counted_beta)
    for steps in (1_000, 1_000_000):
        revolve.split.cache_clear()
        revolve.repeats_needed.cache_clear()
        counted_beta.calls = 0
        pace = MeasuredPace(1, lambda: 1e-3, lambda: True)
        pace.note(1, 1e-4)
        known = steps if name != "online" else None
        room = Room(**MEMORIES[memory])  # type: ignore[arg-type]
        choice = choose("revolve" if known is None else name, known, room, pace)
        assert isinstance(next(choice.schedule.forward()), StoreState)
        assert counted_beta.calls < 25_000


def test_forward_of_a_million_steps_is_a_short_stream() -> None:
    """Of one action a state that leaves, or a logarithm of them."""
    pace = _Fickle([100], [False])
    staged = Multistage(pace, lambda length: (1, 100), slots=1, block=100, steps=1_000_000)
    assert sum(1 for _ in staged.forward()) == 2 * 9_999 + 1, "the last block keeps its tape"
    online = Online(64)
    actions = itertools.takewhile(lambda action: getattr(action, "stop", 0) <= 1_000_000, online.forward())
    assert sum(1 for _ in actions) < 64 * 2 * 20


def test_the_counts_of_checkpoint_schedules() -> None:
    """Both of its schedules for states in memory: there too the first state is one of the slots, and every step is run
    once with what its backward needs."""
    theirs = pytest.importorskip("checkpoint_schedules")

    def forwards(actions: Iterable[Any]) -> int:
        until = itertools.takewhile(lambda action: not isinstance(action, theirs.EndReverse), actions)
        return sum(action.n1 - action.n0 for action in until if isinstance(action, theirs.Forward))

    for steps, slots in itertools.product((1, 2, 3, 7, 20, 33), (1, 2, 3, 5, 8)):
        if steps == 1 or slots < steps:
            assert Revolve.forwards(steps, slots) == forwards(theirs.Revolve(steps, slots)), (steps, slots)
    for steps, slots in ((100, 5), (286, 10), (1000, 10), (1000, 64)):
        mine = counted(Revolve(steps, slots), steps).forwards
        assert mine == forwards(theirs.MultistageCheckpointSchedule(steps, slots, 0)), (steps, slots)


def test_the_choice_falls_on_the_cheapest() -> None:
    def pick(
        budget: int, steps: int | None, pace: MeasuredPace | None = None, name: str = "auto"
    ) -> tuple[str, int | None]:
        room = Room(budget=budget, slots=None, state=10, tape=80, work=100, tier=60)
        choice = choose(name, steps, room, pace)
        assert choice.bytes <= budget
        return choice.schedule.name, choice.forwards

    assert pick(100_000, 1000) == ("keep", 1000)
    assert pick(80_000, 1000) == ("revolve", 1002)
    assert pick(1000, None)[0] == "online"
    ready = MeasuredPace(1, lambda: 1e-4, lambda: True)
    ready.note(1, 1e-3)
    name, forwards = pick(1000, 1000, ready)
    assert name == "multistage"
    assert forwards is not None
    assert forwards < 2000
    assert pick(1000, 1000)[1] == Revolve.forwards(1000, *Room(1000, None, 10, 80, 100).shape(1000, staged=False))
    assert pick(80_000, 1000, ready)[0] in ("revolve", "multistage")
    with pytest.raises(BudgetError, match=r"below the 190 B that this scan needs.*budget=190") as caught:
        pick(180, 1000)
    assert caught.value.floor == 190
    assert pick(190, 10) == ("revolve", 55)
    with pytest.raises(OptionError, match="tiers="):
        pick(1000, 1000, name="multistage")
    with pytest.raises(OptionError, match="'auto', 'keep'"):
        pick(1000, 1000, name="magic")


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5000), st.integers(200, 5000), st.integers(1, 60), st.integers(1, 200))
def test_a_choice_keeps_its_promises(steps: int, budget: int, state: int, tape: int) -> None:
    room = Room(budget=budget, slots=None, state=state, tape=tape, work=50)
    if room.floor > budget:
        return
    choice = choose("auto", steps, room, None)
    found = counted(choice.schedule, steps, state=state, tape=tape)
    assert found.forwards == choice.forwards
    assert room.work + found.most_bytes <= choice.bytes <= budget
    pace = MeasuredPace(1, lambda: 7e-3, lambda: True)
    pace.note(1, 1e-3)
    try:
        staged = choose("multistage", steps, room, pace)
    except BudgetError:
        return
    followed = counted(staged.schedule, steps, state=state, tape=tape)
    assert followed.forwards == staged.forwards
    assert staged.schedule.late == 0
    assert room.bytes(0, 0, staged=True) + followed.most_bytes <= budget


def test_more_memory_hardly_ever_costs_more() -> None:
    """Slots and blocks are whole numbers: the last percent may go either way."""
    pairs = [(state, tape) for state in (1, 7, 64) for tape in (1, 10, 500)]
    for state, tape in pairs:
        costs = [
            choose("auto", 1000, Room(budget=budget, slots=None, state=state, tape=tape, work=0), None).forwards
            for budget in range(state + tape, 100 * (state + tape), 13)
        ]
        lowest = list(itertools.accumulate((cost or 0 for cost in costs), min))
        assert all(cost is not None and cost <= 1.01 * low for cost, low in zip(costs, lowest, strict=True))


ILLEGAL: list[tuple[list[Action], list[Action], str]] = [
    ([Advance(1, 2)], [], "advance from 1 while 0 is at hand"),
    ([Advance(0, 2), StoreState(0)], [], "store of 0 while 2"),
    ([Tape(0, 2)], [LoadState(0)], "load of 0, which is not in memory"),
    ([Tape(0, 1), Tape(1, 2)], [], "while there is a tape"),
    ([Tape(0, 2)], [Reverse(1, 2)], "over the tape"),
    ([StoreState(0), Tape(0, 2)], [Reverse(0, 2)], "left in memory"),
    ([StoreState(0, "tier"), Tape(0, 2)], [Reverse(0, 2)], "left in the tier"),
    ([Advance(0, 2)], [], "backward ends at 2"),
    ([Advance(0, 1)], [], "forward ends at 1 of 2"),
    ([StoreState(0), Advance(0, 2)], [LoadState(0), Tape(0, 1), Reverse(0, 1)], "gradient at 2, reversed from 1"),
    ([Tape(0, 2)], [Reverse(0, 2), FreeState(0)], "free of 0"),
    ([StoreState(0), StoreState(0), Tape(0, 2)], [], "stored twice"),
    ([StoreState(0), Advance(0, 1), StoreState(1), Tape(1, 2)], [], "2 states in memory"),
]


@pytest.mark.parametrize(("forward", "backward", "problem"), ILLEGAL, ids=[problem for *_, problem in ILLEGAL])
def test_the_replayer_rejects(forward: list[Action], backward: list[Action], problem: str) -> None:
    with pytest.raises(IllegalGraphError, match=problem):
        replay(forward, backward, 2, slots=1, block=2)


def test_keep() -> None:
    schedule = KeepTape(5)
    assert replay(schedule.forward(), schedule.backward(5), 5).forwards == 5
