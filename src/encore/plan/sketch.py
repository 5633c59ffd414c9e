"""A plan in outline: what a step holds and costs if some of its feature maps are recomputed, in milliseconds.

The search asks this hundreds of times, so nothing is built: the kept step is simulated once, and for every choice only
the lifetimes that change are moved about on its profile. Positions are the operators and kernels of the kept schedule,
forward then backward. Chains of cheap operators that end in a kernel melt into it: they cost little and allocate
nothing. What comes out is close, not exact; a plan that is chosen is built and simulated in full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from encore.graph import Graph, Op, OpClass
from encore.graph.ops import is_fusible
from encore.schedule import Fused, Run, Schedule, Timeline
from encore.schedule.normalised import FROM_STATISTICS
from encore.schedule.recompute import PATIENCE, PATIENCE_WITHOUT_KERNELS, owners, recomputable


class Seconds(Protocol):
    """What things cost: `encore.cost.Seconds`."""

    def __call__(self, graph: Graph, op: Op | Fused, over: int | None = None) -> float: ...

    def inside(self, graph: Graph, op: Op) -> float: ...


_Asked = tuple[int, bool, bool]
"""A value, whether it could melt into the kernel that asks for it, and whether that is backward's own."""

MELTED = 0.35
"""What a cheap operator costs inside of a kernel that runs anyway, as a share of its cost by itself."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What one choice comes to."""

    dropped: frozenset[int]
    """The values that were chosen to be recomputed."""
    again: frozenset[int]
    """All that is recomputed for it: the cheap values on the way, too."""
    peak: int
    seconds: float
    """Extra time over the kept step."""
    worst: int
    """Position of the worst moment."""
    last_use: dict[int, int]
    """Position after which each kept value is free."""


class Sketch:
    """The kept step, ready to be asked what other choices would do to it."""

    def __init__(
        self, schedule: Schedule, timeline: Timeline, seconds: Seconds, *, fused: bool, frozen: Collection[int] = ()
    ) -> None:
        self.graph = schedule.graph
        self.fused = fused
        self.patience = PATIENCE if fused else PATIENCE_WITHOUT_KERNELS
        self.owner = owners(self.graph, forward_only=False)
        self.seconds = seconds
        items = [
            (moment.phase, moment.action, moment.peak)
            for moment in timeline.moments
            if isinstance(moment.action, Fused | Run) and not self._is_view(moment.action)
        ]
        self.first_backward = sum(phase == "forward" for phase, _, _ in items)
        self.profile = np.array([peak for _, _, peak in items] + [timeline.moments[-1].peak], dtype=np.int64)
        actions = [action for _, action, _ in items]
        self._read_forward(actions[: self.first_backward])
        self._read_backward(actions[self.first_backward :])
        self.droppable = {value for value in recomputable(self.graph) - frozenset(frozen) if value in self.made_at}
        self._cost()
        saved = {self.owner.get(value, value) for value in schedule.saved}
        self.saved = {value for value in saved if value in self.made_at}
        self._take_saved_off()
        self.melting = frozenset(
            value for value in self.droppable - self.saved if self._maker(value).kind is OpClass.CHEAP
        )
        """Cheap values that nobody keeps as it is: if a chain passes through them, they are recomputed too."""

    def _is_view(self, action: Fused | Run) -> bool:
        return isinstance(action, Run) and self.graph.ops[action.op].kind is OpClass.VIEW

    def _maker(self, value: int) -> Op:
        maker = self.graph.producer(value)
        assert maker is not None
        return maker

    # -- facts about the kept step, read once ------------------------------------------------------------------------

    def _read_forward(self, actions: list[Fused | Run]) -> None:
        self.made_at: dict[int, int] = {}
        self.last_forward: dict[int, int] = {}
        self.allocated: set[int] = set()
        """Values with memory of their own in the kept step; others live only inside a kernel."""
        for position, action in enumerate(actions):
            ops = action.ops if isinstance(action, Fused) else (action.op,)
            for op in (self.graph.ops[number] for number in ops):
                for read in op.reads:
                    self.last_forward[self.owner.get(read, read)] = position
                if op.kind is not OpClass.VIEW:
                    for written in op.writes:
                        if written is not None:
                            self.made_at[written] = self.last_forward[written] = position
            written_out = action.writes if isinstance(action, Fused) else self.graph.ops[action.op].writes
            self.allocated.update(value for value in written_out if value is not None)
        self.inputs = {
            value: tuple(dict.fromkeys(self.owner.get(read, read) for read in self._maker(value).reads))
            for value in self.made_at
        }
        self.size = {value: self.graph.bytes_of(value) for value in self.made_at}
        self.light = {value: self.fused and is_fusible(self._maker(value).target) for value in self.made_at}
        self.heavy = {value: self._maker(value).kind is OpClass.HEAVY for value in self.made_at}
        self.asks: dict[int, list[_Asked]] = {
            value: [(source, self.light[value], False) for source in sources if source in self.made_at]
            for value, sources in self.inputs.items()
        }
        """What making a value again asks for."""

    def _read_backward(self, actions: list[Fused | Run]) -> None:
        """For every position: how many barriers lie before it, and the forward values it asks for, the first last."""
        self.reads: list[tuple[int, int, list[_Asked]]] = []
        barriers = 0
        for position, action in enumerate(actions, self.first_backward):
            ops = action.ops if isinstance(action, Fused) else (action.op,)
            owners_read = dict.fromkeys(
                owner
                for number in ops
                for read in self.graph.ops[number].reads
                if (owner := self.owner.get(read, read)) in self.made_at
            )
            light = isinstance(action, Fused) or (self.fused and is_fusible(self.graph.ops[action.op].target))
            if owners_read:
                self.reads.append((position, barriers, [(owner, light, True) for owner in reversed(owners_read)]))
            barriers += not light

    def _cost(self) -> None:
        """Seconds to make a value again: by itself, and inside of a kernel that runs anyway."""
        self.cost: dict[int, float] = {}
        self.melted: dict[int, float] = {}
        for value in self.droppable:
            maker = self._maker(value)
            inside = self.seconds.inside(self.graph, maker) if self.light[value] else 0.0
            from_statistics = self.fused and maker.target in FROM_STATISTICS
            self.cost[value] = inside if from_statistics else self.seconds(self.graph, maker)
            self.melted[value] = min(MELTED * inside, self.cost[value])

    def _take_saved_off(self) -> None:
        """The profile without the feature maps: every choice puts back what it keeps."""
        change = [0] * (len(self.profile) + 1)
        kept = self._last_uses()
        for value in self.saved:
            self._lay(change, value, self.made_at[value], kept.get(value, self.last_forward[value]), -1)
        self.profile += np.cumsum(change[:-1])

    def _last_uses(self) -> dict[int, int]:
        return {value: position for position, _, asked in self.reads for value, _, _ in asked}

    def _lay(self, change: list[int], value: int, first: int, last: int, sign: int = 1) -> None:
        change[first] += sign * self.size[value]
        change[last + 1] -= sign * self.size[value]

    # -- one choice --------------------------------------------------------------------------------------------------

    def outline(self, dropped: Iterable[int]) -> Outline:
        """What it comes to if backward makes the `dropped` values again, and cheap values on the way to them."""
        chosen = frozenset(dropped)
        recomputation = _Recomputation(self, chosen | self.melting)
        change, last_use = recomputation.change, recomputation.last_use
        for value, last in last_use.items():
            if value in self.saved or value not in self.allocated:
                self._lay(change, value, self.made_at[value], last)
            elif last > self.last_forward[value]:
                self._lay(change, value, self.last_forward[value] + 1, last)
        for value in self.saved:
            if value not in last_use and not (self.light[value] and self.last_forward[value] == self.made_at[value]):
                self._lay(change, value, self.made_at[value], self.last_forward[value])
        profile = self.profile + np.cumsum(change[:-1]) + recomputation.spikes
        worst = int(profile.argmax())
        return Outline(
            chosen, frozenset(recomputation.copies), int(profile[worst]), recomputation.seconds, worst, last_use
        )


class _Recomputation:
    """Walks backward once and follows what is made again."""

    def __init__(self, sketch: Sketch, again: frozenset[int]) -> None:
        self.sketch = sketch
        self.change = [0] * (len(sketch.profile) + 1)
        self.spikes = [0] * len(sketch.profile)
        self.last_use: dict[int, int] = {}
        self.seconds = 0.0
        self.copies: dict[int, list[int]] = {}
        """Value -> first position, last position, barriers at its last use, whether it has memory, whether backward
        itself asked for it."""
        self._walk(again)
        for value, copy in self.copies.items():
            self._let_go(value, copy)
            for source, _, _ in sketch.asks[value]:
                if source not in again and self.last_use.get(source, -1) < copy[0]:
                    self.last_use[source] = copy[0]

    def _walk(self, again: frozenset[int]) -> None:
        """One loop over all that is asked for: it goes round a million times a search."""
        sketch, copies = self.sketch, self.copies
        heavy, light, melted, cost = sketch.heavy, sketch.light, sketch.melted, sketch.cost
        patience = sketch.patience
        asks = {value: [ask for ask in sketch.asks[value] if ask[0] in again] for value in again}
        for position, barriers, asked in sketch.reads:
            pending = [ask for ask in asked if ask[0] in again]
            if len(pending) < len(asked):
                self.last_use.update((value, position) for value, _, _ in asked if value not in again)
            while pending:
                wanted, melts, direct = pending.pop()
                copy = copies.get(wanted)
                if copy is not None:
                    if barriers - copy[2] <= patience or heavy[wanted]:
                        copy[1], copy[2] = position, barriers
                        copy[3] |= not melts
                        continue
                    self._let_go(wanted, copy)
                melts = melts and light[wanted]
                copies[wanted] = [position, position, barriers, not melts, direct]
                self.seconds += melted[wanted] if melts else cost[wanted]
                pending += asks[wanted]

    def _let_go(self, value: int, copy: list[int]) -> None:
        first, last, _, material, direct = copy
        if last > first or (material and (direct or self.sketch.heavy[value])):
            size = self.sketch.size[value]
            self.change[first] += size
            self.change[last + 1] -= size
        elif material:  # on the way to something else: there for a moment only
            self.spikes[first] = max(self.spikes[first], self.sketch.size[value])
