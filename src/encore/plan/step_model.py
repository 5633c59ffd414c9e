"""An estimate of what a step takes and costs if some of its activations are not kept; it takes milliseconds.

The search asks this hundreds of times, so nothing is built: the kept step is simulated once, and for every choice only
the lifetimes that change are moved about on its profile. Positions are the operators and kernels of the kept schedule,
forward then backward. Chains of cheap operators that end in a kernel melt into it: they cost little and allocate
nothing. What comes out is close, not exact; a plan that is chosen is built and simulated in full.

A choice is a set of numbers, so that the search can add and take away. A value's own number says that it is recomputed;
numbers from `first_candidate` on are the other fates among which the search chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass

import numpy as np

from encore.fates import Fate, Recompute, owners, recomputable
from encore.fates.normalised import FROM_STATISTICS
from encore.graph import Op, OpClass
from encore.graph.ops import is_fusible
from encore.plan.seconds import ActionSeconds
from encore.schedule import Fused, Run, Schedule, Timeline
from encore.schedule.copies import PATIENCE, PATIENCE_WITHOUT_KERNELS
from encore.schedule.transfers import Bytes, Transfer, place_loads, place_stores

_Asked = tuple[int, bool, bool]
"""A value, whether it could melt into the kernel that asks for it, and whether that is backward's own."""

MELTED = 0.35
"""What a cheap operator costs inside of a kernel that runs anyway, as a share of its cost by itself."""


@dataclass(frozen=True, slots=True)
class RoughPlan:
    """The estimated peak and time of one choice."""

    chosen: frozenset[int]
    """What was chosen, by number: values to recompute, and other fates."""
    peak: int
    seconds: float
    """Extra time over the kept step."""
    worst: int
    """Position of the worst moment."""
    last_use: dict[int, int]
    """Position after which each kept value is free."""
    recomputed: frozenset[int]
    """Values of which backward runs copies, the cheap ones on the way included."""
    restored: Mapping[int, Fate]
    """By value: what restores it in backward, if it is not recomputed. Values that backward does not need have none."""
    in_place: Sequence[Fate]
    """Fates that the operators themselves carry out."""

    @property
    def fates(self) -> frozenset[Fate]:
        """What becomes of every value that is not kept as it is."""
        return frozenset((*map(Recompute, self.recomputed), *self.restored.values(), *self.in_place))


class StepModel:
    """The kept step, on which other choices are evaluated."""

    def __init__(
        self,
        schedule: Schedule,
        timeline: Timeline,
        seconds: ActionSeconds,
        *,
        fused: bool,
        frozen: Collection[int] = (),
        calls: int = 1,
    ) -> None:
        self.graph = schedule.graph
        self.others = calls - 1
        """Calls of the same graph that keep what this one saves, at the peak of a step of several calls."""
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
        between = next((moment.live for moment in timeline.moments if moment.phase == "between"), 0)
        self.not_saved = int(self.profile[max(0, self.first_backward - 1)]) - between
        """What the end of forward takes above what is alive after it."""
        actions = self.actions = [action for _, action, _ in items]
        self.position_of = {action.op: place for place, action in enumerate(actions) if isinstance(action, Run)}
        """Of the operators that are not in a kernel."""
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
        """Cheap values that are not kept as it is: if a chain passes through them, they are recomputed too."""
        self.first_candidate = len(self.graph.values)
        self.candidates: tuple[Fate, ...] = ()

    def for_choices(self, *, recompute: bool) -> StepModel:
        """The same step, to choose other fates next to recomputation, or alone."""
        other = shallow_copy(self)
        if not recompute:
            other.droppable, other.melting = set(), frozenset()
        return other

    def has_more_than(self, others: Iterable[StepModel]) -> bool:
        """Return whether there is something to choose here that there is on none of these."""
        mine = (self.droppable, set(self.candidates))
        return any(mine) and all(mine != (other.droppable, set(other.candidates)) for other in others)

    def add_candidates(self, fates: Iterable[Fate]) -> None:
        """Let the search choose among these fates, too."""
        self.candidates = (*self.candidates, *fates)

    @functools.cached_property
    def durations(self) -> list[float]:
        """Seconds at every position."""
        return [
            self.seconds(self.graph, action if isinstance(action, Fused) else self.graph.ops[action.op])
            for action in self.actions
        ]

    def numbers(self, values: Iterable[int], fates: Iterable[Fate] = ()) -> frozenset[int]:
        """A choice of such values to recompute, and of other fates, by number: of what there is to choose from here."""
        chosen = {value for value in values if value in self.droppable}
        wanted = set(fates)
        chosen.update(number for number, one in enumerate(self.candidates, self.first_candidate) if one in wanted)
        return frozenset(chosen)

    def fate(self, number: int) -> Fate | None:
        """The fate that a number of a choice stands for; None for a value that is recomputed."""
        return self.candidates[number - self.first_candidate] if number >= self.first_candidate else None

    @property
    def open_values(self) -> frozenset[int]:
        """Values that a step keeps, or would keep instead of what is made from them."""
        return frozenset(self.saved | (self.droppable - self.melting))

    def _is_view(self, action: Fused | Run) -> bool:
        return isinstance(action, Run) and self.graph.ops[action.op].kind is OpClass.VIEW

    def _over(self, action: Run) -> list[tuple[int, int]]:
        (result, *_) = self.graph.ops[action.op].writes
        return [] if action.over is None or result is None else [(result, action.over)]

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
        self.overwritten_by = {
            operand: result
            for action in actions
            for result, operand in (action.over if isinstance(action, Fused) else self._over(action))
        }
        """Values whose memory forward gives to a result made from them; backward does so with their copies."""
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
        """What recomputing a value reads."""

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
            barriers += not light and any(self.graph.ops[number].reads for number in ops)

    def _cost(self) -> None:
        """Seconds to recompute a value: by itself, and inside of a kernel that runs anyway."""
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

    def evaluate(self, numbers: Iterable[int]) -> RoughPlan:
        """What a choice comes to. Cheap values on the way to those that are recomputed are recomputed, too."""
        chosen = frozenset(numbers)
        fates = [self.fate(number) for number in chosen] if self.candidates else ()
        in_place = [fate for fate in fates if fate is not None and fate.in_place]
        restored = {fate.value: fate for fate in fates if fate is not None and not fate.in_place}
        gone = chosen | self.melting
        if restored or in_place:
            values = (number for number in gone if number < self.first_candidate)
            gone = frozenset((*values, *restored)).difference(*(fate.targets for fate in in_place))
        walk = _Recomputation(self, gone, restored)
        change, last_use = walk.change, walk.last_use
        for value, last in last_use.items():
            if value in self.saved or value not in self.allocated:
                self._lay(change, value, self.made_at[value], last)
            elif last > self.last_forward[value]:
                self._lay(change, value, self.last_forward[value] + 1, last)
        for value in self.saved:
            if value not in last_use and not (self.light[value] and self.last_forward[value] == self.made_at[value]):
                self._lay(change, value, self.made_at[value], self.last_forward[value])
        seconds = walk.seconds
        for value, fate in walk.restored.items():
            self._lay_code(change, value, fate.held, walk.copies[value][0])
            seconds += fate.encode_seconds
        for fate in in_place:
            self._lay_in_place(change, walk.spikes, fate, last_use)
            seconds += fate.seconds
        profile = self.profile + np.cumsum(change[:-1]) + walk.spikes
        worst = int(profile.argmax())
        peak = int(profile[worst])
        if self.others:
            end = max(0, self.first_backward - 1)
            saved = self.others * max(0, int(profile[end]) - self.not_saved)
            worst, peak = (end if saved > peak else worst), peak + saved
        moved = [one for one in walk.restored.values() if one.tier]
        if moved:
            seconds += self._transfers(
                profile.max() - profile, moved, {one.value: walk.copies[one.value][0] for one in moved}
            )
        recomputed = frozenset(walk.copies).difference(restored)
        return RoughPlan(chosen, peak, seconds, worst, last_use, recomputed, walk.restored, in_place)

    def _transfers(self, room: Bytes, moved: Sequence[Fate], needed_at: Mapping[int, int]) -> float:
        """Seconds by which the step takes longer if these are offloaded and reloaded within its peak."""
        start = self.first_backward
        links = [one.link for one in moved if one.link is not None]
        depth, pace = min(link.depth for link in links), min(link.pace for link in links)
        stores, loads = [], []
        for one, link in zip(moved, links, strict=True):
            stores.append(Transfer(self.last_forward[one.value] + 1, one.moved, link.store_seconds(one.moved)))
            loads.append(Transfer(needed_at[one.value] - start, one.moved, link.load_seconds(one.moved)))
        stores.sort(key=lambda transfer: transfer.place)
        loads.sort(key=lambda transfer: transfer.place)
        _, *out = place_stores(room[:start], self.durations[:start], stores, depth, pace)
        _, *back = place_loads(room[start:-1], self.durations[start:], loads, depth, pace)
        return sum(out) + sum(back)

    def _lay_code(self, change: list[int], value: int, held: int, last: int) -> None:
        """A code is made when forward is done with the value, which is in memory until then."""
        done = self.last_forward[value]
        change[done] += held
        change[last + 1] -= held
        inside_a_kernel = self.light[value] and done == self.made_at[value]
        if value not in self.allocated or (value in self.saved and inside_a_kernel):
            self._lay(change, value, self.made_at[value], done)

    def _lay_in_place(self, change: list[int], spikes: list[int], fate: Fate, last_use: Mapping[int, int]) -> None:
        for value, size in fate.shrinks:
            last = last_use.get(value, self.last_forward[value])
            change[self.made_at[value]] += size - self.size[value]
            change[last + 1] -= size - self.size[value]
        for op, size in fate.workspaces:
            spikes[self.position_of[op]] += size


class _Recomputation:
    """Walks backward once and follows what is recomputed."""

    def __init__(self, model: StepModel, again: frozenset[int], fates: Mapping[int, Fate]) -> None:
        self.model = model
        self.fates = fates
        self.change = [0] * (len(model.profile) + 1)
        self.spikes = [0] * len(model.profile)
        self.last_use: dict[int, int] = {}
        self.seconds = 0.0
        self.copies: dict[int, list[int]] = {}
        """Value -> first position, last position, barriers at its last use, whether it has memory, whether backward
        itself asked for it."""
        self._walk(again)
        self.restored = {value: fates[value] for value in self.copies if value in fates}
        for value, copy in self.copies.items():
            self._release(value, copy)
            if value not in fates:
                for source, _, _ in model.asks[value]:
                    if source not in again and self.last_use.get(source, -1) < copy[0]:
                        self.last_use[source] = copy[0]

    def _walk(self, again: frozenset[int]) -> None:
        """One loop over all that is asked for: it goes round a million times a search."""
        model, copies = self.model, self.copies
        heavy, light, melted, cost = model.heavy, model.light, model.melted, model.cost
        patience = model.patience
        asks = {value: [ask for ask in model.asks[value] if ask[0] in again] for value in again}
        if self.fates:  # restored copies read nothing but what is kept for them
            once = {value: fate.restored_once for value, fate in self.fates.items()}
            heavy, light = {**heavy, **once}, {**light, **dict.fromkeys(once, False)}
            cost = {**cost, **{value: fate.restore_seconds for value, fate in self.fates.items()}}
            asks.update((value, []) for value in self.fates)
        for position, barriers, asked in model.reads:
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
                    self._release(wanted, copy)
                melts = melts and light[wanted]
                copies[wanted] = [position, position, barriers, not melts, direct]
                self.seconds += melted[wanted] if melts else cost[wanted]
                pending += asks[wanted]

    def _release(self, value: int, copy: list[int]) -> None:
        first, last, _, material, direct = copy
        if last == first and not direct and self._is_written_over(value, first):
            return
        if last > first or (material and (direct or self.model.heavy[value])):
            size = self.model.size[value]
            self.change[first] += size
            self.change[last + 1] -= size
        elif material:  # on the way to something else: there for a moment only
            self.spikes[first] = max(self.spikes[first], self.model.size[value])

    def _is_written_over(self, value: int, position: int) -> bool:
        """Return whether its copy becomes that of a result, made from it at once, which has memory."""
        copy = self.copies.get(self.model.overwritten_by.get(value, -1))
        return copy is not None and copy[0] == position and bool(copy[3])
