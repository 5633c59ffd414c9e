"""Following a schedule: forward, then backward, with the numbers of a plain loop.

What makes them equal to the last bit:

- Steps run again from the very state they ran from, with its random state, buffers and autocast; backward of their
  tapes runs under no other autocast than backward of a plain loop would.
- Inside a block of steps the tape is the plain loop's own. At its edges, autograd adds gradients up in the order in
  which they arrive, latest step first. So the sum that a parameter has so far is given to the next block as the first
  arrival (a root of its own), not added to that block's sum afterwards; and where y is the new carry itself, its
  gradient arrives at the next block's first state, before what the steps there contribute.
- Steps that keep no tape run without gradients where that gives the same bits, which the first step is asked about.
- A block that ends in another state than the one that was run from there before raises `ReplayError`, and so does a
  step with another y (`witness`) or one that writes to what the first step did not write to (`reach`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.bptt.actions import Action, Advance, Free, Load, Prefetch, Reverse, Schedule, Store, Tape
from encore.bptt.probe import Facts, hooks_aside, leaves_behind, sequence_number
from encore.bptt.reach import Untold
from encore.bptt.report import EVENTS, Event, ScanReport
from encore.bptt.snapshot import Around, Held, same_bits
from encore.bptt.source import Once, Source
from encore.bptt.trees import Structure
from encore.bptt.witness import Witness
from encore.errors import EncoreError, OptionError, ReplayError
from encore.tiers import Parcel, Tier, Transfers

Call = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(slots=True)
class _Taped:
    """A block whose backward can run."""

    start: int
    stop: int
    since: int
    entry: list[Tensor]
    out: list[Tensor]
    ys: list[list[Tensor]]
    inputs: list[Tensor | None]


class Results:
    """The ys, written where they will stay if their number is known."""

    def __init__(self, structure: Structure, examples: Sequence[Tensor], length: int | None) -> None:
        self._structure = structure
        self._kinds = [(one.shape, one.dtype) for one in examples]
        self._parts: list[list[Tensor]] = [[] for _ in examples]
        self._whole: list[Tensor] | None = None
        if length is not None:
            self._whole = [one.new_empty((length, *one.shape)) for one in examples]

    def put(self, step: int, y: Any) -> list[Tensor]:
        """The tensors of this step's y, which are noted."""
        tensors = self._structure.flatten(y)
        for (shape, dtype), tensor in zip(self._kinds, tensors, strict=True):
            if tensor.shape != shape:
                raise OptionError(f"the step's y changes its shape from {tuple(shape)} to {tuple(tensor.shape)}")
            if tensor.dtype != dtype:
                raise OptionError(f"the step's y changes its type from {dtype} to {tensor.dtype}")
        if self._whole is None:
            for parts, tensor in zip(self._parts, tensors, strict=True):
                parts.append(tensor.detach())
        else:
            for whole, tensor in zip(self._whole, tensors, strict=True):
                whole[step] = tensor.detach()
        return tensors

    def all(self) -> list[Tensor]:
        if self._whole is None:
            self._whole = [torch.stack(parts) for parts in self._parts]
            self._parts.clear()
        return self._whole


class Run:
    """One scan, from its first step to its last gradient."""

    def __init__(
        self,
        call: Call,
        carry: Structure,
        start: Sequence[Tensor],
        source: Source,
        consts: Sequence[Tensor],
        facts: Facts,
        schedule: Schedule,
        tiers: Sequence[Tier],
        *,
        truncate: int | None,
        note_pace: Callable[[int, float], None] | None,
        contexts: Callable[[], contextlib.AbstractContextManager[object]],
        tell: Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None]]],
        report: ScanReport,
        resources: contextlib.ExitStack,
        untold: Untold | None,
        moved_before: Transfers,
    ) -> None:
        self.call = call
        self.carry = carry
        self.source = source
        self.consts = consts
        self.facts = facts
        self.schedule = schedule
        self.tiers = tiers
        self.truncate = truncate
        self.note_pace = note_pace
        self.contexts = contexts
        self.tell = tell
        self.report = report
        self._events = report.events  # the report may be another scan's before this one is over
        self.resources = resources
        self.untold = untold
        self.moved_before = moved_before
        self.spent = False
        self._carried = dict(facts.y_is_carry)
        self._wanted = [tensor.requires_grad for tensor in start]
        self._working: list[Tensor] = _detached(start)
        self._at = 0
        self._end: int | None = None
        self._memory: dict[int, tuple[Held, Around]] = {}
        self._parcels: dict[int, tuple[Parcel, tuple[bool, ...]]] = {}
        inputs: dict[int, tuple[Parcel, list[Any]]] = source.parcels if isinstance(source, Once) else {}
        self._inputs = inputs
        self._finalizer = weakref.finalize(self, _abandon, self._parcels, inputs)
        self._finalizer.atexit = False
        self._leaving: dict[int, int] = {}
        """By the step of a state in the tier: the place of its store among the events."""
        self._last_stored = 0
        self._tape: _Taped | None = None
        self._before = facts.surroundings.read()
        self._still = False
        self._results: Results | None = Results(facts.ys, facts.results, source.length)
        self._witness = Witness()
        self._began = time.perf_counter()
        self._tick: Callable[[int], None] = lambda step: None
        # Of backward.
        self._carry_gradients: list[Tensor | None] = []
        self._y_gradients: Sequence[Tensor | None] = ()
        self._sums: dict[int, Tensor] = {}
        self._input_gradients: list[Tensor | None] = [None] * len(source.tensors)
        self._after: list[Tensor] | None = None

    # -- both ways ---------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """The last carry and the ys."""
        began = time.perf_counter()
        with self.tell("scan forward", self.source.length) as self._tick:
            for action in self.schedule.forward():
                self._follow(action)
                if self._end is not None:
                    break
        steps = self._end if self._end is not None else self._at
        self._end = self.report.steps = steps
        self.report.late_stores = self.schedule.late
        last = _detached(self._tape.out if self._tape else self._working)
        assert self._results is not None
        ys, self._results = self._results.all(), None
        self._still = self.facts.quiet_around and not any(self.facts.surroundings.read(self._before).changed)
        if self._tape is None:  # else what is run again first ends where this tape begins
            self._after = [tensor.clone() for tensor in last]
        self._working = []
        if self.untold is not None and self.report.counts.advanced:  # else nothing will be run again
            self.untold.check()
        self.untold = None
        self.report.forward_seconds = time.perf_counter() - began
        self._tell_transfers()
        return last, ys

    def backward(
        self, carry: Sequence[Tensor | None], ys: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:  # fmt: skip
        """Gradients of the first carry, of the inputs, and of consts and parameters."""
        began = time.perf_counter()
        self.spent = True
        self._carry_gradients = list(carry)
        self._y_gradients = ys
        steps = self._end
        assert steps is not None
        later = None if self._still else self.facts.surroundings.read()
        try:
            with hooks_aside(self.facts.parameters), self.tell("scan backward", steps) as self._tick:
                for action in self.schedule.backward(steps):
                    self._follow(action)
        finally:
            if later is not None:
                self.facts.surroundings.write(later)
            self._tell_transfers()
            self.close()
        self.report.backward_seconds = time.perf_counter() - began
        sums = [self._sums.get(id(tensor)) for tensor in (*self.consts, *self.facts.parameters)]
        return self._carry_gradients, self._input_gradients, sums

    def close(self) -> None:
        """Let everything go."""
        self.spent = True
        self._memory.clear()
        for held in (self._parcels, self._inputs):
            for parcel, _ in held.values():
                parcel.tier.free(parcel)
            held.clear()
        self._tape = self._after = None
        self._working = []
        self.resources.close()

    def _follow(self, action: Action) -> None:
        began = time.perf_counter()
        DO[type(action)](self, action)
        self.report.actions += 1
        if len(self._events) < EVENTS:
            name = type(action).__name__
            start = action.step if isinstance(action, Store | Load | Free | Prefetch) else action.start
            stop = action.step if isinstance(action, Store | Load | Free | Prefetch) else action.stop
            ended = time.perf_counter()
            if isinstance(action, Store | Load):
                name = f"{name} {action.level}"
                if action.level == "tier":
                    began, ended = self._moved(action, began, ended)
            self._events.append(Event(name, start, stop, began - self._began, ended - self._began))

    def _moved(self, action: Store | Load, began: float, ended: float) -> tuple[float, float]:
        """When a state was on its way, where the tier can tell. Of one that leaves, the end is told once it is freed,
        which is when it must be known."""
        parcel, _ = self._parcels[action.step]
        if isinstance(action, Store):
            self._leaving[action.step] = len(self._events)
        elif parcel.times.fetched is not None:
            return parcel.times.fetched
        return began, ended

    # -- one action --------------------------------------------------------------------------------------------------

    def _advance(self, action: Advance) -> None:
        began = time.perf_counter()
        results = self._results
        tree = self.carry.unflatten(self._working)
        self._working = []
        step = action.start
        tick = self._tick
        y: Any = None
        with self.contexts(), torch.set_grad_enabled(not self.facts.quiet):
            for item in self.source.items(action.start, action.stop):
                if not self.facts.quiet:
                    tree = self.carry.unflatten([_leaf(tensor) for tensor in self.carry.flatten(tree)])
                tree, y = self.call(tree, item)
                if results is not None:
                    self.carry.flatten(tree)  # which checks it
                    put = results.put(step, y)
                    if put:
                        self._witness.note(put)
                    tick(step)
                step += 1
        self._working = _detached(self.carry.flatten(tree))
        self._at = step
        self.report.counts.advanced += step - action.start
        if step < action.stop:
            self._end = step
        elif self.note_pace is not None:
            self.note_pace(step - action.start, time.perf_counter() - began)

    def _make_tape(self, action: Tape) -> None:
        start, stop = action.start, action.stop
        since = sequence_number()
        cut = self._is_cut(start)
        seen: dict[int, Tensor] = {}
        for place, tensor in enumerate(self._working):  # what was one tensor stays one
            if id(tensor) not in seen:
                seen[id(tensor)] = tensor.detach() if cut or (start == 0 and not self._wanted[place]) else _leaf(tensor)
        entry = [seen[id(tensor)] for tensor in self._working]
        self._working = []
        results, tick = self._results, self._tick
        ys: list[list[Tensor]] = []
        with self.contexts(), torch.enable_grad():
            items, inputs = self.source.with_leaves(start, stop)
            tree = self.carry.unflatten(entry)
            for step, item in enumerate(items, start):
                if step > start and self._is_cut(step):
                    tree = self.carry.unflatten(_detached(self.carry.flatten(tree)))
                tree, y = self.call(tree, item)
                ys.append(self.facts.ys.flatten(y))
                if results is not None:
                    with torch.no_grad():
                        results.put(step, y)
                    tick(step)
        out = self.carry.flatten(tree)
        self._at = stop
        self._tape = _Taped(start, stop, since, entry, out, ys, inputs)
        self.report.counts.taped += stop - start
        self.report.counts.longest_tape = max(self.report.counts.longest_tape, stop - start)
        if self._after is not None and not all(map(same_bits, out, self._after)):
            raise ReplayError(
                f"steps {start} to {stop - 1} ended in another state than before when they were run again: the step "
                "depends on something that is neither an argument, a parameter, a random number nor a buffer in a "
                "tensor; gradients would be wrong"
            )
        if results is None and ys[0] and not self._witness.agrees(start, ys):
            raise ReplayError(
                f"steps {start} to {stop - 1} gave another y than before when they were run again: the step depends on "
                "something that is neither an argument, a parameter, a random number nor a buffer in a tensor; "
                "gradients would be wrong"
            )

    def _reverse(self, action: Reverse) -> None:
        tape, self._tape = self._tape, None
        assert tape is not None
        parameters = [*self.consts, *self.facts.parameters]
        arriving = [*self._arriving(tape)]
        self._after = [tensor.detach() for tensor in tape.entry]
        found: dict[int, Tensor | None] = {}
        if arriving:
            entry = {id(tensor): tensor for tensor in tape.entry}
            wanted = [*entry.values(), *(leaf for leaf in tape.inputs if leaf is not None), *parameters]
            inputs = [tensor for tensor in wanted if tensor.requires_grad]
            self._check_leaves(tape, inputs)
            arriving += [(tensor, self._sums[id(tensor)]) for tensor in parameters if id(tensor) in self._sums]
            roots, gradients = zip(*arriving, strict=True)
            arriving.clear()
            given = torch.autograd.grad(roots, inputs, gradients, allow_unused=True)
            found = dict(zip(map(id, inputs), given, strict=True))
            del roots, gradients, given
        self._carry_gradients = []
        for place, tensor in enumerate(tape.entry):
            first = all(tensor is not other for other in tape.entry[:place])
            self._carry_gradients.append(found.get(id(tensor)) if first else None)
        for tensor in parameters:
            total = found.get(id(tensor))
            if total is not None:
                self._sums[id(tensor)] = total
        for position, leaf in enumerate(tape.inputs):
            part = None if leaf is None else found.get(id(leaf))
            if part is not None:
                self._input_gradient(position)[self.source.rows(tape.start, tape.stop)] = part
        if isinstance(self.source, Once):
            self.source.forget(tape.start, tape.stop)
        assert self._end is not None
        self._tick(self._end - tape.start - 1)

    def _arriving(self, tape: _Taped) -> Iterator[tuple[Tensor, Tensor]]:
        """What autograd is given to begin with, in the order in which a plain loop would see it arrive."""
        for position, gradient in enumerate(self._y_gradients):
            if gradient is not None:
                moved = tape.stop != self._end and not self._is_cut(tape.stop) and position in self._carried
                for step, y in enumerate(tape.ys[: len(tape.ys) - moved], tape.start):
                    if y[position].requires_grad:
                        yield y[position], gradient[step]
        if tape.start and not self._is_cut(tape.start):
            for position, place in self._carried.items():
                gradient = self._y_gradients[position]
                if gradient is not None:
                    yield tape.entry[place], gradient[tape.start - 1]
        for tensor, gradient in zip(tape.out, self._carry_gradients, strict=True):
            if gradient is not None and tensor.requires_grad:
                yield tensor, gradient

    def _store(self, action: Store) -> None:
        around = self.facts.surroundings.read(self._before)
        counts = self.report.counts
        if action.level == "memory":
            self._memory[action.step] = Held(self._working), around
            counts.memory_stores += 1
            counts.most_slots = max(counts.most_slots, len(self._memory))
            return
        if isinstance(self.source, Once) and action.step:
            self.source.put_aside(self._last_stored, action.step, self._put)
        self._last_stored = action.step
        self._parcels[action.step] = self._put([*self._working, *around.changes()]), around.changed
        counts.tier_stores += 1
        counts.most_in_tier = max(counts.most_in_tier, len(self._parcels))

    def _put(self, tensors: list[Tensor]) -> Parcel:
        """Into the nearest tier that has room; the last one says no if none has."""
        size = sum(tensor.nbytes for tensor in tensors)
        tier = next((tier for tier in self.tiers[:-1] if tier.has_room(size)), self.tiers[-1])
        return tier.store(tensors)

    def _prefetch(self, action: Prefetch) -> None:
        parcel, _ = self._parcels[action.step]
        parcel.tier.prefetch(parcel)
        if isinstance(self.source, Once):
            self.source.prefetch(action.step)

    def _load(self, action: Load) -> None:
        if action.level == "memory":
            held, around = self._memory[action.step]
            self._working = held.tensors()
            self.report.counts.memory_loads += 1
        else:
            parcel, changed = self._parcels[action.step]
            tensors = parcel.tier.load(parcel)
            self._working = tensors[: self.carry.count]
            around = self._before.with_changes(changed, tensors[self.carry.count :])
            if isinstance(self.source, Once):
                self.source.bring_back(action.step)
            self.report.counts.tier_loads += 1
        self._at = action.step
        if not self._still:
            self.facts.surroundings.write(around)

    def _free(self, action: Free) -> None:
        if action.level == "memory":
            del self._memory[action.step]
        else:
            parcel, _ = self._parcels.pop(action.step)
            place = self._leaving.pop(action.step, None)
            if place is not None and parcel.times.stored is not None:
                event = self._events[place]
                ended = max(event.ended, parcel.times.stored - self._began)
                self._events[place] = dataclasses.replace(event, ended=ended)
            parcel.tier.free(parcel)
            if isinstance(self.source, Once):
                self.source.bring_back(action.step)

    # ----------------------------------------------------------------------------------------------------------------

    def _is_cut(self, step: int) -> bool:
        return self.truncate is not None and step > 0 and step % self.truncate == 0

    def _input_gradient(self, position: int) -> Tensor:
        gradient = self._input_gradients[position]
        if gradient is None:
            gradient = self._input_gradients[position] = torch.zeros_like(self.source.tensors[position])
        return gradient

    def _check_leaves(self, tape: _Taped, known: Sequence[Tensor]) -> None:
        """Gradients are asked for by name: a parameter that is not known would get none."""
        outputs = [*tape.out, *(tensor for y in tape.ys for tensor in y)]
        expected = {id(tensor) for tensor in known} | {id(tensor) for tensor in tape.entry}
        for key, leaf in leaves_behind(outputs, tape.since).items():
            if key not in expected:
                raise OptionError(
                    f"steps {tape.start} to {tape.stop - 1} use a parameter of shape {tuple(leaf.shape)} that the "
                    "first step did not use; pass it as part of consts=, and take that as the step's third argument"
                )
        for position, place in self.facts.y_is_carry:
            if tape.stop != self._end and tape.ys[-1][position] is not tape.out[place]:
                raise ReplayError(f"the step's y was its new carry at first and is not at step {tape.stop - 1}")

    def _tell_transfers(self) -> None:
        self.report.transfers = transfers_of(self.tiers).since(self.moved_before)


DO: dict[type, Callable[[Run, Any], None]] = {
    Advance: Run._advance, Tape: Run._make_tape, Reverse: Run._reverse, Store: Run._store,
    Prefetch: Run._prefetch, Load: Run._load, Free: Run._free,
}  # fmt: skip


def transfers_of(tiers: Sequence[Tier]) -> Transfers:
    """What went through some tiers so far."""
    total = Transfers()
    for tier in tiers:
        total.add(tier.transfers)
    return total


def _abandon(*held: dict[int, tuple[Parcel, Any]]) -> None:
    """Nobody will ask for these parcels any more. Called by the collector, perhaps amidst a call of their tier."""
    for parcels in held:
        for parcel, _ in parcels.values():
            parcel.tier.abandon(parcel)
        parcels.clear()


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Without their history; what was one tensor stays one."""
    made = {id(tensor): tensor.detach() for tensor in tensors}
    return [made[id(tensor)] for tensor in tensors]


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf


class ScanFunction(torch.autograd.Function):
    """A run, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)  # autograd then notices when one is written to before backward
        carry, ys = run.forward()
        ctx.counts = len(carry), len(ys)
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        carry = [tensor.clone() if tensor.untyped_storage()._cdata in given else tensor for tensor in carry]
        whole = [tensor for tensor in (*carry, *ys) if not (tensor.is_floating_point() or tensor.is_complex())]
        ctx.mark_non_differentiable(*whole)
        return (*carry, *ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        if run.spent:
            raise EncoreError("this scan's states are gone after one backward; call encore.scan again for another")
        _ = ctx.saved_tensors
        count, _ = ctx.counts
        carry, inputs, sums = run.backward(gradients[:count], gradients[count:])
        return (None, *carry, *inputs, *sums)
