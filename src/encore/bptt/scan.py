"""`encore.scan`: a loop over time that can be differentiated in the memory you name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from encore.bptt.choose import Choice, Room, choose
from encore.bptt.multistage import MeasuredPace
from encore.bptt.probe import Facts, probe
from encore.bptt.reach import Untold
from encore.bptt.report import ScanReport
from encore.bptt.run import Results, Run, ScanFunction, transfers_of
from encore.bptt.snapshot import packed_bytes
from encore.bptt.source import Once, Source, source_of
from encore.bptt.trees import Structure
from encore.errors import OptionError, TierError
from encore.options import parse_budget
from encore.terminal import notes
from encore.terminal import progress as progress_bar
from encore.tiers import Tier, open_tiers
from encore.units import bytes_text

TOLD = 20
"""Progress is told so often."""
THOUSAND = 1000
"""Steps after which it is told first, where nobody knows how many there will be."""

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
    """`carry, y = step(carry, x)` for every x, and then backward through all of it, in as much memory as you say.

    The same numbers, to the last bit, as the loop written out; forward, and backward to `carry`, `xs`, `consts` and the
    parameters that `step` uses. `carry`, `x` and `y` are tensors in tuples, lists and dicts; `xs` has time as its first
    dimension, can be something with a length and an index, or an iterator of unknown length; `ys` come back stacked, or
    are `None` where `y` is.

    budget    bytes ("64MiB") for states, tapes and the work of one step; inputs, results and gradients are yours. "min"
              is the least there is.
    slots     instead of it: so many states, with the tape of one step at a time.
    tiers     where states may go beside: "disk", "host", an `encore.tiers.Disk(...)`, or several, nearest first.
    consts    tensors that were computed with gradients outside and are used by every step: `step(carry, x, consts)`.
    truncate  gradients stop after so many steps: the carry is detached at every multiple of it.
    schedule  "auto" takes the cheapest that fits; "keep", "revolve" and "multistage" are the ones it takes it from.
    report    a `ScanReport` that is filled in: counts, times, a picture.

    `step` is run several times. Beside its arguments and parameters it may depend on random numbers and on tensors it
    writes to (BatchNorm's statistics), which are put back; not on other things that change.
    """
    _check_options(budget, slots, truncate)
    source = source_of(xs, length)
    structure = Structure(carry, "the carry")
    start = structure.flatten(carry)
    given = _Consts(consts)
    if source.length == 0:
        return carry, None
    if not torch.is_grad_enabled():
        return _plain(given.call(step), structure, start, source)
    head = list(source.items(0, 1))
    if not head:
        return carry, None
    first = head.pop()
    contexts = _autocast_contexts(start)
    call = given.call(step)

    def in_context(carry: Any, x: Any) -> tuple[Any, Any]:
        with contexts():
            return call(carry, x)

    facts = probe(
        in_context, structure, [tensor.detach() for tensor in start], first,
        (*start, *source.tensors, *given.tensors), given.leaves,
    )  # fmt: skip
    del first
    if not facts.differentiable:
        return _plain(call, structure, start, source)
    with contextlib.ExitStack() as stack:
        opened = open_tiers(tiers, stack)
        for tier in opened:
            tier.forgive()  # whoever stored before has been told
        moved_before = transfers_of(opened)
        choice, pace = _choose(schedule, source, start, facts, opened, budget, slots)
        told = ScanReport() if report is None else report
        _describe(told, choice, start, facts)
        run = Run(
            call, structure, start, source, given.leaves, facts, choice.schedule, opened,
            truncate=truncate, note_pace=None if pace is None else pace.note, contexts=contexts,
            tell=_teller if progress else _silence, report=told, resources=stack.pop_all(),
            untold=None if choice.schedule.name == "keep" else Untold(step, facts.surroundings.storages),
            moved_before=moved_before,
        )  # fmt: skip
    try:
        found = ScanFunction.apply(run, *start, *source.tensors, *given.tensors, *facts.parameters)
    except BaseException:
        run.close()
        raise
    count = structure.count
    return structure.unflatten(found[:count]), facts.ys.unflatten(found[count:]) if facts.ys.count else None


class _Consts:
    """Tensors from outside, and leaves in their place: what the step does with them ends there."""

    def __init__(self, consts: Any) -> None:
        self._given = consts is not None
        self._structure = Structure(consts, "consts")
        self.tensors = self._structure.flatten(consts) if self._given else []
        self.leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors]

    def call(self, step: Step) -> Callable[[Any, Any], tuple[Any, Any]]:
        """The step with its consts, and a look at what it returns."""
        more = (self._structure.unflatten(self.leaves),) if self._given else ()

        def call(carry: Any, x: Any) -> tuple[Any, Any]:
            result = step(carry, x, *more)
            if type(result) is not tuple or len(result) != 2:
                raise OptionError(f"the step must return a tuple (carry, y); it returned a {type(result).__name__}")
            return result

        return call


def _plain(call: Callable[[Any, Any], tuple[Any, Any]], structure: Structure, start: Any, source: Source) -> Any:
    """The loop itself, where nobody wants a gradient."""
    tree = structure.unflatten(start)
    results: Results | None = None
    ys: Structure | None = None
    length = source.length
    for step, item in enumerate(source.items(0, length if length is not None else 1 << 62)):
        tree, y = call(tree, item)
        carried = structure.flatten(tree)
        if results is None or ys is None:
            ys = Structure(y, "the step's y")
            results = Results(ys, ys.flatten(y), length)
        put = results.put(step, y)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*carried, *put)):
            raise OptionError(
                f"step {step} uses a parameter, and the first step used none; pass it as part of consts=, and take "
                "that as the step's third argument"
            )
        if isinstance(source, Once):
            source.forget(step, step + 1)
    return tree, None if results is None or ys is None or not ys.count else ys.unflatten(results.all())


def _choose(
    name: str,
    source: Source,
    start: Sequence[Tensor],
    facts: Facts,
    tiers: Sequence[Tier],
    budget: int | str | None,
    slots: int | None,
) -> tuple[Choice, MeasuredPace | None]:
    around = facts.surroundings.read()
    states = facts.surroundings.states
    drawn = (state for state, draws in zip(around.tensors[:states], facts.draws, strict=True) if draws)
    moved = [*start, *drawn, *around.tensors[states:]]
    state = packed_bytes(moved)
    tier_memory = max((tier.memory(state) for tier in tiers), default=0)
    room = Room(None, slots, state=state, tape=facts.tape, work=facts.work, tier=tier_memory)
    if budget is not None:
        asked = parse_budget(budget)
        if asked.share is not None:
            raise OptionError(f"budget={budget!r}: the unplanned peak of a scan is not known; give bytes, or 'min'")
        room = Room(room.floor if asked.is_floor else asked.bytes, None, state, facts.tape, facts.work, tier_memory)
    elif slots is None:
        if tiers:
            raise OptionError("tiers= needs to know how much stays in memory; give budget= or slots=")
        name = "keep" if name == "auto" else name
        if name != "keep":
            raise OptionError(f"schedule={name!r} needs to know how much memory there is; give budget= or slots=")
    pace = None
    if tiers and name != "keep":
        pace = _measured_pace(tiers, state, moved, facts)
    choice = choose(name, source.length, room, pace)
    if choice.interval is not None and source.length is not None and pace is not None:
        count = source.length // choice.interval + 1
        if len(tiers) == 1 and not tiers[0].has_room(state, count):
            raise TierError(
                f"the states of {source.length} steps take about {bytes_text(count * state)}, and the "
                f"{tiers[0].name} tier has not so much room; give it more, add another tier, or leave it out"
            )
    return choice, pace if choice.schedule.name == "multistage" else None


def _measured_pace(tiers: Sequence[Tier], state: int, moved: Sequence[Tensor], facts: Facts) -> MeasuredPace:
    """From one state that is stored for the purpose, and one step."""
    parcel = tiers[0].store([tensor.detach() for tensor in moved])
    try:
        tiers[0].wait_for(parcel)
    finally:
        tiers[0].free(parcel)

    def in_use() -> Tier:
        return next((tier for tier in tiers[:-1] if tier.has_room(state)), tiers[-1])

    def store_seconds() -> float:
        """The fastest so far. Too short an interval only means that some states are stored later than they could be;
        too long a one means steps that are run again for nothing."""
        fastest = in_use().transfers.fastest_store
        return 0.0 if math.isinf(fastest) else fastest

    pace = MeasuredPace(1, store_seconds, lambda: in_use().ready(state))
    pace.note(1, facts.step_seconds)
    return pace


def _describe(report: ScanReport, choice: Choice, start: Sequence[Tensor], facts: Facts) -> None:
    fresh = ScanReport(
        schedule=choice.schedule.name, slots=choice.schedule.slots, block=choice.schedule.block,
        interval=choice.interval, state_bytes=packed_bytes(start), tape_bytes=facts.tape, predicted_bytes=choice.bytes,
        predicted_forwards=choice.forwards,
    )  # fmt: skip
    for name in ScanReport.__slots__:
        setattr(report, name, getattr(fresh, name))


def _autocast_contexts(
    tensors: Sequence[Tensor],
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Autocast as it is now, to be entered again. Without its cache of weights: what is put there without gradients
    would have none for whoever finds it later."""
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
def _teller(label: str, length: int | None) -> Iterator[Callable[[int], None]]:
    """Tells after each twentieth of the way; of an unknown way, after every thousand steps, and later whenever it
    has grown by an eighth."""
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
    with progress_bar(label, TOLD) as advance:
        told = 0

        def tick(step: int) -> None:
            nonlocal told
            while (step + 1) * TOLD >= (told + 1) * length and told < TOLD:
                told += 1
                advance(f"step {step + 1:,} of {length:,}")

        yield tick


def _check_options(budget: object, slots: int | None, truncate: int | None) -> None:
    if budget is not None and slots is not None:
        raise OptionError("budget= and slots= exclude each other; give one of them")
    for name, value in (("slots", slots), ("truncate", truncate)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError(f"{name}={value!r} is not accepted; give a count of at least 1")
