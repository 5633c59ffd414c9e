"""Which steps of a compiled model are measured, and the warning or error for those that took more than their budget.

A plan bounds what captured graphs allocate. A loss, metrics or another model run outside of them, so a step is also
measured when it is over: the first steps of every program, and then every step whose number is a power of two; with
`strict=True`, all. Reading the allocator's events takes about a microsecond for each of them. Where a step exceeds its
budget, the next one runs under a profiler that records Python calls as well, so that the warning names lines; this
takes longer, and changes no result. With `strict=True` the first measured step already runs that way.

A step in which something is compiled or checked is not measured, since that allocates, too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from encore.cost.observation import AliveBlock, Observation, Segment
from encore.errors import BudgetExceededError
from encore.reports.steps import MeasuredStep, PlainLine
from encore.units import bytes_text

if TYPE_CHECKING:
    from encore.compiler.session import Session

SAME = 0.01
"""How far the peaks of two steps may differ, as a fraction, for the lines of one to be those of the other."""
MOST_KNOWN = 1024
"""Programs whose measured steps are remembered."""
NAMED_LINES = 6
"""Lines in a message."""


class MeasuredSteps:
    """The measured steps of one session."""

    def __init__(self) -> None:
        self.steps = 0
        self.latest: MeasuredStep | None = None
        self.is_due = False
        """Whether the running step is one to measure, whatever plans are made from it."""
        self.lines_wanted = False
        """Whether the next step records which lines allocate."""
        self._known: dict[Hashable, MeasuredStep] = {}
        """The latest measured step of every program."""
        self._unknown_ran = False
        self._compiled: tuple[Hashable, ...] = ()
        """What had been compiled and checked when the running step began."""
        self._told = False
        self._untold: MeasuredStep | None = None
        """A step above its budget whose lines are not known yet."""

    def begin(self, session: Session, *, wanted: bool) -> Observation | None:
        """A step begins: observe it, if it is one to measure. `wanted` are those that plans are made from."""
        self.steps += 1
        budget, strict = session.options.budget, session.options.strict
        bounded = budget is not None and not budget.is_floor
        power_of_two = self.steps > 1 and self.steps & (self.steps - 1) == 0
        due = self._unknown_ran or self.lines_wanted or strict or power_of_two
        self.is_due = bounded and due and self.steps > 1
        if not wanted and not self.is_due:
            return None
        lines = self.lines_wanted or (strict and self._unknown_ran)
        self._compiled = _compiled(session)
        return Observation.start(lines=lines, watched=_old_gradients(session))

    def note(
        self,
        session: Session,
        program: Hashable,
        observation: Observation | None,
        segments: Sequence[Segment] | None,
        captured: Iterable[int],
        last: int,
        bound: tuple[int, int | None],
    ) -> MeasuredStep | None:
        """Return what a step took that is over, if it was measured. `captured` are the segments in which captured
        graphs ran, `last` is the last segment of the step, `bound` its resident bytes and its budget."""
        if observation is None or segments is None or self._compiled != _compiled(session):
            self.skip(program)
            return None
        self._unknown_ran = False
        resident, limit = bound
        peak = max(segment.peak for segment in segments[: last + 1]) - session.packed_bytes
        plain, lines = None, tuple[PlainLine, ...]()
        before = self._known.get(program)
        if observation.lines:
            self.lines_wanted = False
            lines = plain_lines(observation.alive_at_peak(last), set(captured))
            plain = sum(one.bytes for one in lines)
        elif before is not None and before.plain is not None and abs(before.step_peak - peak) <= SAME * peak:
            plain, lines = before.plain, before.lines
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[program] = self.latest = MeasuredStep(self.steps, resident, peak, limit, plain, lines)
        return self.latest

    def skip(self, program: Hashable) -> None:
        """A step of this program is over and was not measured."""
        self._unknown_ran = program not in self._known

    def tell(self, session: Session, step: MeasuredStep | None, floor: int = 0) -> None:
        """Warn of a step above its budget, once its lines are known, or raise with `strict=True`; `step` is None if the
        step that is over was not measured. `floor` is the least that plans can come to."""
        exceeds = step is not None and step.excess > 0
        if step is not None and exceeds and session.options.strict:
            self.lines_wanted = not step.lines
            raise BudgetExceededError(_message(session.name, step, floor), floor=max(floor, step.taken))
        waiting, self._untold = self._untold, None
        if session.sharded is not None and step is not None and not exceeds:
            waiting = None  # the threads of a process group free its buffers unseen, so that a step may seem to exceed
        if self._told or not (exceeds or waiting):
            return
        if step is not None and exceeds and step.plain is None and waiting is None:
            self._untold, self.lines_wanted = step, True
            return
        self._told, self.lines_wanted = True, False
        told = step if exceeds else waiting
        assert told is not None
        warnings.warn(f"encore: {_message(session.name, told, floor)}", stacklevel=2)


def _message(name: str, step: MeasuredStep, floor: int) -> str:
    limit = 0 if step.limit is None else step.limit
    enough = max(floor, step.taken)
    lines = [f"a step of {name} took {bytes_text(step.taken)}, more than its budget of {bytes_text(limit)}:"]
    if step.plain is None:
        lines[0] += (
            " code outside of the captured graphs (a loss, or what Dynamo leaves to Python) takes the difference"
        )
    else:
        rest = len(step.lines) - NAMED_LINES
        lines[0] += f" at its peak, code outside of the captured graphs keeps {bytes_text(step.plain)}, allocated at"
        lines += [f"  {line}" for line in step.lines[:NAMED_LINES]]
        lines += [f"  and at {rest} other lines"] if rest > 0 else []
    what = (step.lines[0].line if step.lines else "") or "such code"
    return "\n".join(
        [
            *lines,
            f"Move {what} into the compiled model (compile a function or module that returns the loss), free what the "
            f"step does not need, or raise the budget to {enough} bytes ({bytes_text(enough)})",
        ]
    )


def plain_lines(blocks: Sequence[AliveBlock], captured: set[int]) -> tuple[PlainLine, ...]:
    """The memory that was not allocated in the segments of captured graphs, by line, largest first."""
    sizes: Counter[tuple[str, str, str]] = Counter()
    for block in blocks:
        if block.segment not in captured:
            place = block.place
            sizes[place.line, place.function, place.operator] += block.bytes
    return tuple(PlainLine(*where, size) for where, size in sizes.most_common())


def _compiled(session: Session) -> tuple[Hashable, ...]:
    """What has been compiled so far, and how often gradients were checked: both allocate."""
    checks = (one.lossy_check.measured if one.lossy_check is not None else () for one in session.graphs)
    return tuple(zip(map(id, session.graphs), map(len, checks), strict=True))


def _old_gradients(session: Session) -> Iterable[torch.Tensor]:
    """Gradients of the step before, which the running step may free."""
    alive = (reference() for reference in session.tensors.values())
    gradients = [tensor.grad for tensor in alive if tensor is not None and tensor.grad is not None]
    if session.sharded is not None:
        gradients += session.sharded.gradients
    return [gradient for gradient in gradients if gradient.layout is torch.strided]
