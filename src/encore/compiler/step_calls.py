"""The calls of a step that ran, what was around them, and the choices of plans for them that are within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

from encore.cost.observation import Segment
from encore.graph import Role
from encore.plan import stack_plans
from encore.plan.calls import Around, CallCosts, SharedBudget, SharedChoice, received_bytes

if TYPE_CHECKING:
    from encore.compiler.call_plans import CallPlans
    from encore.compiler.session import CapturedGraph
    from encore.compiler.variants import GraphRunner, Variant
    from encore.plan.goal import Footprint

TOLERANCE = 0.01
"""How far the observed peak may be from the predicted one, as a fraction, for plans to stay."""


@dataclass(slots=True)
class Call:
    """One call of a graph in a step that ran."""

    runner: GraphRunner
    captured: CapturedGraph
    """The plan that it ran with."""
    reads: tuple[int, ...] = ()
    """Storages of its inputs, by address."""
    outputs: tuple[tuple[StorageWeakRef, int], ...] = ()
    """Storages of its outputs that it does not save, with their bytes."""
    made: tuple[StorageWeakRef, ...] = ()
    """Storages of all its outputs."""
    marks: list[int] = field(default_factory=list)
    """Marks of the observation: begin and end of its forward, then of its backward."""
    alive_around: list[int] = field(default_factory=list)
    """Bytes of outputs that are alive when its forward begins, and when its backward begins."""
    backward_place: int = -1
    """How many backwards ran before its own; -1 while it has not run."""
    received: tuple[StorageWeakRef, ...] = ()
    """Storages of the gradients that its backward was given."""
    frees_received: bool = False
    """Whether these were freed before its backward was over."""

    @property
    def is_pending(self) -> bool:
        """Return whether its backward may still come."""
        return self.backward_place < 0 and any(not storage.expired() for storage in self.made)


@dataclass(slots=True)
class Program:
    """The calls of a step, by the numbers of their graphs, and how they are planned."""

    calls: tuple[int, ...]
    whole: bool = False
    """Whether it is one call of one graph, which is all of the model."""
    sharded: bool = False
    """Whether the model is: then its graphs do not say what is there on a device."""
    shared: SharedChoice | None = None
    variants: tuple[Variant, ...] = ()
    """One for each call."""
    around: tuple[Around, ...] = ()
    """What was around each call when it was planned."""
    unplanned: int = 0
    """Peak of the step with everything kept."""
    floor: int = 0
    resident: int = 0
    """Bytes that are there before and after the step."""
    observed: int | None = None
    """Peak of the step as the allocator gave it."""
    rounds: int = 0
    """How often it was planned."""
    settled: bool = False
    limit: int | None = None
    """The budget in bytes."""
    footprint: Footprint | None = None
    """What that budget bounds instead of allocated bytes."""
    was_rehearsed: bool = False
    """Whether its plans were made before its first step, and have run in none yet."""

    def forget_plans(self) -> None:
        """Have the calls planned again."""
        self.variants, self.shared, self.rounds, self.settled = (), None, 0, False

    @property
    def is_as_predicted(self) -> bool:
        """Return whether the peak of the latest step is within the budget and what its plans predict."""
        if self.shared is None or self.observed is None:
            return False
        is_within = self.limit is None or self.resident + self.observed <= self.limit
        return is_within and abs(self.observed - self.shared.step_peak) <= TOLERANCE * self.shared.step_peak


def within_budget(found: SharedBudget, program: Program, plans: Sequence[CallPlans]) -> SharedChoice | None:
    """The fastest choice within the program's budget; None if there is none, or if the lowest peak is asked for. On a
    device whose allocator reserves memory, what plain code keeps comes on top of what the calls do."""
    limit, footprint = program.limit, program.footprint
    if limit is None:
        return None
    if footprint is None:
        return found.within(limit - program.resident)
    for choice in found.choices():
        run = [one.candidates[number].plan for one, number in zip(plans, choice.plans, strict=True)]
        plain = max(0, choice.step_peak - stack_plans(run).step_peak)
        if choice.step_peak <= limit and footprint(run) + plain <= limit:
            return choice
    return None


def step_peak(around: Sequence[Around], costs: Sequence[CallCosts]) -> int:
    """The peak of a step whose calls run these plans."""
    return SharedBudget(around, [[cost] for cost in costs]).floor


def outside_peak(calls: Sequence[Call], segments: Sequence[Segment], end: int) -> int:
    """The peak before the first call and after the last backward, which no plan changes."""
    first, last = calls[0].marks[0], max(call.marks[3] for call in calls)
    return max(segment.peak for segment in (*segments[: first + 1], *segments[last + 1 : end + 1]))


def arounds(calls: Sequence[Call], segments: Sequence[Segment] | None, *, reduces: bool = False) -> list[Around]:
    """What was around every call of a step that ran: as observed, or else as far as captured graphs tell. Where another
    package `reduces` gradients after every call, they do not stay."""
    saved = [CallCosts.of(call.captured.plan).saved for call in calls]
    if segments is None:
        gradients = _gradients_before(calls, reduces=reduces)
        return [
            Around(call.alive_around[0], call.alive_around[1] + gradient, frees_received=call.frees_received)
            for call, gradient in zip(calls, gradients, strict=True)
        ]
    found = []
    for number, call in enumerate(calls):
        before = sum(saved[:number])
        begin, end, backward, _ = call.marks
        given = received_bytes(call.captured.plan.schedule.graph)
        plain = max(segments[end + 1].peak, segments[backward].peak)
        found.append(
            Around(
                forward=segments[begin].end - before,
                backward=segments[backward].end - before - saved[number] - given,
                between=plain - before - saved[number],
                frees_received=call.frees_received,
            )
        )
    return found


def _gradients_before(calls: Sequence[Call], *, reduces: bool) -> list[int]:
    """For every call, the gradients that are there when its backward begins: those of parameters, and those of outputs
    of earlier calls, from the backwards before it."""
    parameters: dict[object, int] = {}
    inputs: dict[tuple[int, int], int] = {}
    found = [0] * len(calls)
    order = sorted(range(len(calls)), key=lambda number: calls[number].backward_place)
    makers: list[dict[int, int]] = []
    addresses: dict[int, int] = {}
    for number, call in enumerate(calls):
        makers.append({place: addresses[one] for place, one in enumerate(call.reads) if one in addresses})
        addresses.update((storage.cdata, number) for storage, _ in call.outputs)
    for number in order:
        call = calls[number]
        graph = call.captured.plan.schedule.graph
        given = sum(size for (maker, _), size in inputs.items() if maker != number)
        found[number] = sum(parameters.values()) + given
        inputs = {key: size for key, size in inputs.items() if key[0] != number}
        for place, (primal, gradient) in enumerate(graph.with_gradients()):
            if gradient is None:
                continue
            size = graph.bytes_of(gradient)
            if graph.values[primal].role is Role.PARAMETER and reduces:
                continue
            if graph.values[primal].role is Role.PARAMETER:
                identity = graph.identities[place] if graph.identities else None
                parameters[(id(call.runner), place) if identity is None else identity] = size
            elif place in makers[number]:
                inputs[makers[number][place], call.reads[place]] = size
    return found
