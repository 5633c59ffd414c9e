"""From the plans of a step to everything that it allocates, from the first parameter to the last gradient: the
simulator's walk as births and deaths."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from itertools import count

from encore.compiler.operator_names import operator_name
from encore.graph import Graph, Op
from encore.plan import Plan
from encore.reports.allocations import Allocation
from encore.schedule import Change, Fused, Kind, Run, changes, residents, stretches
from encore.schedule.simulator import Moment


def allocations_of(plans: Sequence[Plan]) -> tuple[Allocation, ...]:
    """What a step allocates that runs these plans, in the order in which it comes."""
    return _Recorder(plans).run()


class _Recorder:
    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = plans
        self.graphs = [plan.schedule.graph for plan in plans]
        self.events = count()
        self.born: list[Allocation] = []
        self.died: dict[int, int] = {}
        """The death of each, by its place among the born."""
        self.alive: dict[tuple[int, int], int] = {}
        """Where the living are among the born, by graph and storage."""

    def run(self) -> tuple[Allocation, ...]:
        for index, value, kind in residents(self.graphs):
            self._bring(self.graphs[index], value, kind, self.graphs[index].bytes_of(value))
        by_moment = [self._by_moment(plan, first=index == 0) for index, plan in enumerate(self.plans)]
        for part in stretches(self.graphs, [plan.timeline for plan in self.plans]):
            moments = self.plans[part.graph].timeline.moments
            for place in part.moments:
                self._apply(part.graph, by_moment[part.graph][place])
                self._work(self.graphs[part.graph], moments[place])
            if part.moments.stop == len(moments):
                self._apply(part.graph, by_moment[part.graph][len(moments)])
        return tuple(dataclasses.replace(item, died=self.died.get(place)) for place, item in enumerate(self.born))

    def _by_moment(self, plan: Plan, *, first: bool) -> dict[int, list[Change]]:
        found: dict[int, list[Change]] = defaultdict(list)
        for change in changes(plan.schedule, plan.timeline, first=first):
            found[change.moment].append(change)
        return found

    def _apply(self, index: int, changes: Sequence[Change]) -> None:
        graph = self.graphs[index]
        for change in changes:
            if change.storage is None:
                self._bring(graph, None, change.kind, change.bytes)
            elif change.bytes > 0:
                self.alive[index, change.storage] = len(self.born)
                self._bring(graph, graph.storages[change.storage].values[0], change.kind, change.bytes)
            elif change.bytes < 0:
                self._take(self.alive.pop((index, change.storage)))
            elif (index, change.storage) in self.alive:  # written over; what has no bytes is not there to be
                before = self.alive[index, change.storage]
                self._take(before)
                self.alive[index, change.storage] = len(self.born)
                self._bring(graph, change.value, change.kind, self.born[before].bytes)

    def _work(self, graph: Graph, moment: Moment) -> None:
        """What an operator allocates for itself while it runs."""
        size = moment.peak - moment.live
        if size:
            assert isinstance(moment.action, Run | Fused)
            op = graph.ops[moment.action.op if isinstance(moment.action, Run) else moment.action.ops[0]]
            made = next((value for value in op.writes if value is not None), None)
            self._bring(graph, made, Kind.WORKSPACE, size)
            self._take(len(self.born) - 1)

    def _bring(self, graph: Graph, value: int | None, kind: Kind, size: int) -> None:
        if not size:
            return
        producer: Op | None = None if value is None else graph.producer(value)
        known = None if value is None else graph.values[value]
        storage = None if known is None else known.storage
        self.born.append(
            Allocation(
                name="copy" if known is None else known.name,
                operator="" if producer is None else operator_name(producer),
                module="" if producer is None else producer.module,
                source="" if producer is None else producer.source,
                shape=() if known is None or kind is Kind.WORKSPACE else known.shape,
                kind=kind.value,
                bytes=size,
                device=_device(graph) if storage is None else graph.storages[storage].device,
                born=next(self.events),
                died=None,
            )
        )

    def _take(self, place: int) -> None:
        self.died[place] = next(self.events)


def _device(graph: Graph) -> str:
    """Where most of a graph's storages are: that of memory which no value stands for."""
    devices = [storage.device for storage in graph.storages]
    return max(set(devices), key=devices.count, default="cpu")
