"""`encore.scan`: a loop over time that can be differentiated in a given memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from encore.bptt.first_step import Facts, probe
from encore.bptt.loop import Loop, Results
from encore.bptt.multistage import MeasuredPace
from encore.bptt.reach import ReachableTensors
from encore.bptt.report import ScanReport
from encore.bptt.run import ScanFunction, ScanRun, ShowProgress, transfers_of
from encore.bptt.selection import RoomAsked, TimeChoice, choose
from encore.bptt.snapshot import packed_bytes
from encore.bptt.source import Once, source_of
from encore.bptt.trees import Structure
from encore.errors import OptionError, TierError
from encore.terminal import notes
from encore.terminal import progress as progress_bar
from encore.tiers import Tier, open_tiers
from encore.units import bytes_text

SHOWN = 20
"""Times that progress is shown."""
THOUSAND = 1000
"""Steps after which it is shown first, if their number is not known."""

Step = Callable[..., tuple[Any, Any]]


def scan(
    step: Step,
    carry: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    consts: Any = None,
    budget: int | str | None = None,
    slots: int | None = None,
    tiers: str | Tier | Sequence[str | Tier] = (),
    truncate: int | None = None,
    schedule: str = "auto",
    progress: bool = False,
    report: ScanReport | None = None,
) -> tuple[Any, Any]:
    """`carry, y = step(carry, x)` for every x, and then backward through all of it, in a given memory.

    The same numbers, to the last bit, as the loop written out; forward, and backward to `carry`, `xs`, `consts` and the
    parameters that `step` uses. `carry`, `x` and `y` are tensors in tuples, lists and dicts; `xs` has time as its first
    dimension, can be something with a length and an index, or an iterator of unknown length; `ys` are stacked, or
    `None` if `y` is.

    budget    bytes ("64MiB") for states, tapes and the work of one step; inputs, results and gradients come on top.
              "min" is the least that is possible.
    slots     instead of it: so many states, with the tape of one step at a time.
    tiers     where states may be offloaded to: "disk", "host", an `encore.tiers.Disk(...)`, or several, nearest first.
    consts    tensors that were computed with gradients outside and are used by every step: `step(carry, x, consts)`.
    truncate  gradients stop after so many steps: the carry is detached at every multiple of it.
    schedule  "auto" takes the cheapest of "keep", "revolve" and "multistage" that fits.
    report    a `ScanReport` that is filled in: counts, times, a picture.

    `step` is run several times. Besides its arguments and parameters it may depend on random numbers and on tensors it
    writes to (BatchNorm's statistics), which are restored; not on other things that change.
    """
    _check_options(budget, slots, truncate)
    source = source_of(xs, length)
    structure = Structure(carry, "the carry")
    start = structure.flatten(carry)
    given = _Consts(consts)
    loop = Loop(given.call(step), structure, start, source, given.leaves, truncate, _autocast_contexts(start))
    if source.length == 0:
        return carry, None
    if not torch.is_grad_enabled():
        return _plain(loop)
    head = list(source.items(0, 1))
    if not head:
        return carry, None
    facts = probe(loop, head.pop(), (*start, *source.tensors, *given.tensors))
    if not facts.differentiable:
        return _plain(loop)
    room = RoomAsked(budget, slots, schedule)
    run = _planned(step, loop, facts, room, tiers, _show if progress else _silence, report or ScanReport())
    try:
        found = ScanFunction.apply(run, *start, *source.tensors, *given.tensors, *facts.parameters)
    except BaseException:
        run.close()
        raise
    count = structure.count
    return structure.unflatten(found[:count]), facts.ys.unflatten(found[count:]) if facts.ys.count else None


class _Consts:
    """Tensors from outside, and leaves that replace them: the graph of a step ends there."""

    def __init__(self, consts: Any) -> None:
        self._given = consts is not None
        self._structure = Structure(consts, "consts")
        self.tensors = self._structure.flatten(consts) if self._given else []
        self.leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors]

    def call(self, step: Step) -> Callable[[Any, Any], tuple[Any, Any]]:
        """The step with its consts; checks what it returns."""
        more = (self._structure.unflatten(self.leaves),) if self._given else ()

        def call(carry: Any, x: Any) -> tuple[Any, Any]:
            result = step(carry, x, *more)
            if type(result) is not tuple or len(result) != 2:
                raise OptionError(f"the step must return a tuple (carry, y); it returned a {type(result).__name__}")
            return result

        return call


def _plain(loop: Loop) -> tuple[Any, Any]:
    """The loop itself, if no gradient is needed."""
    tree = loop.carry.unflatten(loop.start)
    results: Results | None = None
    ys: Structure | None = None
    length = loop.source.length
    for step, item in enumerate(loop.source.items(0, length if length is not None else 1 << 62)):
        tree, y = loop.call(tree, item)
        carried = loop.carry.flatten(tree)
        if results is None or ys is None:
            ys = Structure(y, "the step's y")
            results = Results(ys, ys.flatten(y), length)
        put = results.put(step, y)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*carried, *put)):
            raise OptionError(
                f"step {step} uses a parameter, and the first step used none; pass it as part of consts=, and take "
                "that as the step's third argument"
            )
        if isinstance(loop.source, Once):
            loop.source.forget(step, step + 1)
    return tree, None if results is None or ys is None or not ys.count else ys.unflatten(results.all())


def _planned(
    step: Step,
    loop: Loop,
    facts: Facts,
    room: RoomAsked,
    tiers: str | Tier | Sequence[str | Tier],
    show: ShowProgress,
    report: ScanReport,
) -> ScanRun:
    """Open the tiers, choose a schedule, and return the run that will follow it."""
    with contextlib.ExitStack() as stack:
        opened = open_tiers(tiers, stack)
        for tier in opened:
            tier.forgive()  # the error of an earlier scan has been raised there
        moved_before = transfers_of(opened)
        choice, pace = _choose(loop, facts, room, opened)
        report.begin(
            schedule=choice.schedule.name, slots=choice.schedule.slots, block=choice.schedule.block,
            interval=choice.interval, state_bytes=packed_bytes(loop.start), tape_bytes=facts.tape,
            predicted_bytes=choice.bytes, predicted_forwards=choice.forwards,
        )  # fmt: skip
        return ScanRun(
            loop, facts, choice.schedule, opened,
            note_pace=None if pace is None else pace.note, show=show, report=report, resources=stack.pop_all(),
            reached=None if choice.schedule.name == "keep" else ReachableTensors(step, facts.surroundings.storages),
            moved_before=moved_before,
        )  # fmt: skip


def _choose(
    loop: Loop, facts: Facts, asked: RoomAsked, tiers: Sequence[Tier]
) -> tuple[TimeChoice, MeasuredPace | None]:
    """The schedule, and the pace at which it stores states in a tier."""
    around = facts.surroundings.read()
    states = facts.surroundings.states
    drawn = (state for state, draws in zip(around.tensors[:states], facts.draws, strict=True) if draws)
    moved = [*loop.start, *drawn, *around.tensors[states:]]
    state, length = packed_bytes(moved), loop.source.length
    workspace = max((tier.memory(state) for tier in tiers), default=0)
    name, room = asked.room(state, facts.tape, facts.work, workspace, staged=bool(tiers))
    pace = _measured_pace(tiers, state, moved, facts) if tiers and name != "keep" else None
    choice = choose(name, length, room, pace)
    if choice.interval is not None and length is not None and pace is not None:
        count = length // choice.interval + 1
        if len(tiers) == 1 and not tiers[0].has_room(state, count):
            raise TierError(
                f"the states of {length} steps take about {bytes_text(count * state)}, and the "
                f"{tiers[0].name} tier has not so much room; give it more, add another tier, or leave it out"
            )
    return choice, pace if choice.schedule.name == "multistage" else None


def _measured_pace(tiers: Sequence[Tier], state: int, moved: Sequence[Tensor], facts: Facts) -> MeasuredPace:
    """The pace by one state that is stored for the purpose, and one step."""
    parcel = tiers[0].store([tensor.detach() for tensor in moved])
    try:
        tiers[0].wait_for(parcel)
    finally:
        tiers[0].free(parcel)

    def in_use() -> Tier:
        return next((tier for tier in tiers[:-1] if tier.has_room(state)), tiers[-1])

    def store_seconds() -> float:
        """The fastest so far. Too short an interval only means that some states are stored later than planned; too
        long a one means steps that are recomputed for nothing."""
        fastest = in_use().transfers.fastest_store
        return 0.0 if math.isinf(fastest) else fastest

    pace = MeasuredPace(1, store_seconds, lambda: in_use().ready(state))
    pace.note(1, facts.step_seconds)
    return pace


def _autocast_contexts(
    tensors: Sequence[Tensor],
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Autocast as it is now, to be entered again. Without its cache of weights: a weight cast without gradients would
    be found there by steps that need them."""
    devices = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
    states = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in states:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    return enter


@contextlib.contextmanager
def _silence(label: str, length: int | None) -> Iterator[Callable[[int], None]]:
    yield lambda step: None


@contextlib.contextmanager
def _show(label: str, length: int | None) -> Iterator[Callable[[int], None]]:
    """Show progress after each twentieth of the steps; if their number is not known, after every thousand, and later
    whenever it has grown by an eighth."""
    if length is None:
        with notes(label) as note:
            following = THOUSAND

            def count(step: int) -> None:
                nonlocal following
                if step + 1 >= following:
                    following += max(THOUSAND, following // 8)
                    note(f"step {step + 1:,}")

            yield count
        return
    with progress_bar(label, SHOWN) as advance:
        shown = 0

        def tick(step: int) -> None:
            nonlocal shown
            while (step + 1) * SHOWN >= (shown + 1) * length and shown < SHOWN:
                shown += 1
                advance(f"step {step + 1:,} of {length:,}")

        yield tick


def _check_options(budget: object, slots: int | None, truncate: int | None) -> None:
    if budget is not None and slots is not None:
        raise OptionError("budget= and slots= exclude each other; give one of them")
    for name, value in (("slots", slots), ("truncate", truncate)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError(f"{name}={value!r} is not accepted; give a count of at least 1")
