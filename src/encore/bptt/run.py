"""Following a schedule: forward, then backward, with the numbers of a plain loop.

What makes them equal to the last bit:

- Steps run again from the very state they ran from, with its random state, buffers and autocast; backward of their
  tapes runs under no other autocast than backward of a plain loop would.
- Inside a block of steps the tape is the plain loop's own. At its edges gradients arrive as they would there
  (`gradients.py`).
- Steps that keep no tape run without gradients if the first step gives the same bits both ways.
- A block that ends in another state than the one that was run from there before raises `ReplayError`, and so does a
  step with another y (`witness`) or one that writes to what the first step did not write to (`reach`).

The replayer (`replay.py`) follows every action, too, and counts them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from encore.bptt.actions import Action, Advance, FreeState, LoadState, Prefetch, Reverse, StoreState, Tape, TimeSchedule
from encore.bptt.first_step import Facts, sequence_number, without_hooks
from encore.bptt.gradients import BlockTape, Gradients
from encore.bptt.loop import Loop, Results, detached, leaf
from encore.bptt.reach import ReachableTensors
from encore.bptt.replayer import Replayer
from encore.bptt.report import EventLog, ScanReport
from encore.bptt.snapshot import same_bits
from encore.bptt.states import States
from encore.bptt.witness import Witness
from encore.errors import EncoreError, ReplayError
from encore.tiers import Parcel, Tier, Transfers

ShowProgress = Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None]]]


class ScanRun:
    """One scan, from its first step to its last gradient."""

    def __init__(
        self,
        loop: Loop,
        facts: Facts,
        schedule: TimeSchedule,
        tiers: Sequence[Tier],
        *,
        note_pace: Callable[[int, float], None] | None,
        show: ShowProgress,
        report: ScanReport,
        resources: contextlib.ExitStack,
        reached: ReachableTensors | None,
        moved_before: Transfers,
    ) -> None:
        self.loop = loop
        self.facts = facts
        self.schedule = schedule
        self.tiers = tiers
        self.note_pace = note_pace
        self.show = show
        self.report = report
        self.resources = resources
        self.reached = reached
        self.moved_before = moved_before
        self.spent = False
        self._replayer = Replayer(slots=schedule.slots, block=schedule.block)
        report.counts = self._replayer.counts
        self._log = EventLog(report)
        self._states = States(facts.surroundings, loop.source, tiers)
        self._wanted = [tensor.requires_grad for tensor in loop.start]
        self._working: list[Tensor] = detached(loop.start)
        self._at = 0
        self._end: int | None = None
        self._tape: BlockTape | None = None
        self._still = False
        """Whether surroundings stay as they are, so that they need not be restored."""
        self._results: Results | None = Results(facts.ys, facts.results, loop.source.length)
        self._witness = Witness()
        self._tick: Callable[[int], None] = lambda step: None
        self._gradients: Gradients | None = None
        self._after: list[Tensor] | None = None
        """The state that the next block to be run again must end in."""

    # -- both ways ---------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """The last carry and the ys."""
        began = time.perf_counter()
        with self.show("scan forward", self.loop.source.length) as self._tick:
            for action in self.schedule.forward():
                self._follow(action)
                if self._end is not None:
                    break
        steps = self._end if self._end is not None else self._at
        self._replayer.turn(steps)
        self._end = self.report.steps = steps
        self.report.late_stores = self.schedule.late
        last = detached(self._tape.out if self._tape else self._working)
        assert self._results is not None
        ys, self._results = self._results.all(), None
        now = self.facts.surroundings.read(self._states.base)
        self._still = self.facts.quiet_around and not any(now.changed)
        if self._tape is None:  # else what is run again first ends where this tape begins
            self._after = [tensor.clone() for tensor in last]
        self._working = []
        if self.reached is not None and self._replayer.counts.advanced:  # else nothing will be run again
            self.reached.check()
        self.reached = None
        self.report.forward_seconds = time.perf_counter() - began
        self._report_transfers()
        return last, ys

    def backward(
        self, carry: Sequence[Tensor | None], ys: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Gradients of the first carry, of the inputs, and of consts and parameters."""
        began = time.perf_counter()
        self.spent = True
        steps = self._end
        assert steps is not None
        gradients = self._gradients = Gradients(self.loop, self.facts, steps, carry, ys)
        later = None if self._still else self.facts.surroundings.read()
        try:
            with without_hooks(self.facts.parameters), self.show("scan backward", steps) as self._tick:
                for action in self.schedule.backward(steps):
                    self._follow(action)
            self._replayer.finish()
        finally:
            if later is not None:
                self.facts.surroundings.write(later)
            self._report_transfers()
            self.close()
        self.report.backward_seconds = time.perf_counter() - began
        return gradients.carry, gradients.inputs, gradients.sums

    def close(self) -> None:
        """Free everything."""
        self.spent = True
        self._states.close()
        self._tape = self._after = self._gradients = None
        self._working = []
        self.resources.close()

    def _follow(self, action: Action) -> None:
        began = time.perf_counter()
        parcel: Parcel | None = None
        match action:
            case Advance(start, stop):
                self._advance(start, stop)
                action = Advance(start, self._at)  # as far as inputs reach
            case Tape(start, stop):
                self._make_tape(start, stop)
            case Reverse():
                self._reverse()
            case StoreState(step, level):
                parcel = self._states.store(step, level, self._working)
            case Prefetch(step):
                self._states.prefetch(step)
            case LoadState(step, level):
                parcel = self._load(step, level)
            case FreeState(step, level):
                parcel = self._states.free(step, level)
        if not isinstance(action, Advance) or action.stop > action.start:
            self._replayer.follow(action)
        self._log.note(action, began, parcel)

    # -- one action --------------------------------------------------------------------------------------------------

    def _advance(self, start: int, stop: int) -> None:
        began = time.perf_counter()
        carry, results, quiet = self.loop.carry, self._results, self.facts.quiet
        tree = carry.unflatten(self._working)
        self._working = []
        step = start
        tick = self._tick
        y: Any = None
        with self.loop.contexts(), torch.set_grad_enabled(not quiet):
            for item in self.loop.source.items(start, stop):
                if not quiet:
                    tree = carry.unflatten([leaf(tensor) for tensor in carry.flatten(tree)])
                tree, y = self.loop.call(tree, item)
                if results is not None:
                    carry.flatten(tree)  # which checks it
                    put = results.put(step, y)
                    if put:
                        self._witness.note(put)
                    tick(step)
                step += 1
        self._working = detached(carry.flatten(tree))
        self._at = step
        if step < stop:
            self._end = step
        elif self.note_pace is not None:
            self.note_pace(step - start, time.perf_counter() - began)

    def _make_tape(self, start: int, stop: int) -> None:
        since = sequence_number()
        carry, results, tick = self.loop.carry, self._results, self._tick
        entry = self._entry(start)
        ys: list[list[Tensor]] = []
        with self.loop.contexts(), torch.enable_grad():
            items, inputs = self.loop.source.with_leaves(start, stop)
            tree = carry.unflatten(entry)
            for step, item in enumerate(items, start):
                if step > start and self.loop.is_cut(step):
                    tree = carry.unflatten(detached(carry.flatten(tree)))
                tree, y = self.loop.call(tree, item)
                ys.append(self.facts.ys.flatten(y))
                if results is not None:
                    with torch.no_grad():
                        results.put(step, y)
                    tick(step)
        self._at = stop
        self._tape = BlockTape(start, stop, since, entry, carry.flatten(tree), ys, inputs)
        self._check_same(self._tape)

    def _entry(self, start: int) -> list[Tensor]:
        """The working state as leaves; a tensor that occurs twice stays one."""
        cut = self.loop.is_cut(start)
        seen: dict[int, Tensor] = {}
        for place, tensor in enumerate(self._working):
            if id(tensor) not in seen:
                seen[id(tensor)] = tensor.detach() if cut or (start == 0 and not self._wanted[place]) else leaf(tensor)
        entry = [seen[id(tensor)] for tensor in self._working]
        self._working = []
        return entry

    def _check_same(self, tape: BlockTape) -> None:
        """Raise `ReplayError` if a block that was run again differs from before."""
        differs = ""
        if self._after is not None and not all(map(same_bits, tape.out, self._after)):
            differs = "ended in another state than before"
        elif self._results is None and tape.ys[0] and not self._witness.agrees(tape.start, tape.ys):
            differs = "gave another y than before"
        if differs:
            raise ReplayError(
                f"steps {tape.start} to {tape.stop - 1} {differs} when they were run again: the step depends on "
                "something that is neither an argument, a parameter, a random number nor a buffer in a tensor; "
                "gradients would be wrong"
            )

    def _reverse(self) -> None:
        tape, self._tape = self._tape, None
        assert tape is not None
        assert self._gradients is not None
        assert self._end is not None
        self._after = [tensor.detach() for tensor in tape.entry]
        self._gradients.reverse(tape)
        self._tick(self._end - tape.start - 1)

    def _load(self, step: int, level: Any) -> Parcel | None:
        self._working, around, parcel = self._states.load(step, level, self.loop.carry.count)
        self._at = step
        if not self._still:
            self.facts.surroundings.write(around)
        return parcel

    def _report_transfers(self) -> None:
        self.report.transfers = transfers_of(self.tiers).since(self.moved_before)


def transfers_of(tiers: Sequence[Tier]) -> Transfers:
    """What went through some tiers so far."""
    total = Transfers()
    for tier in tiers:
        total.add(tier.transfers)
    return total


class ScanFunction(torch.autograd.Function):
    """A run, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, run: ScanRun, *tensors: Tensor) -> tuple[Tensor, ...]:
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
        run: ScanRun = ctx.run
        if run.spent:
            raise EncoreError("this scan's states are gone after one backward; call encore.scan again for another")
        _ = ctx.saved_tensors
        count, _ = ctx.counts
        carry, inputs, sums = run.backward(gradients[:count], gradients[count:])
        return (None, *carry, *inputs, *sums)
