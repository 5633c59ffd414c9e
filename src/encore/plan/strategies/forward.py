"""Forward with its views taken out: who makes a tensor, who reads it, and what backward asks for.

Views own nothing and are taken again for free, so every question about recomputation is one about the owners of
memory. Here an operator reads owners, through however many views; a view itself appears nowhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from encore.fates import recomputable
from encore.graph import Graph, Op, OpClass
from encore.schedule.order import order_backward


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward part of a graph, without views."""

    graph: Graph
    ops: tuple[Op, ...]
    """Forward's operators in order."""
    operands: dict[int, tuple[int, ...]]
    """By operator: the owners that it reads, itself or through views."""
    readers: dict[int, list[int]]
    """By owner: the operators of forward that read it or a view of it, in order."""
    needed: frozenset[int]
    """Values made in forward that backward reads, itself or through views: the feature maps of an unplanned step."""
    returned: frozenset[int]
    """Values that the caller keeps after forward."""
    droppable: frozenset[int]
    """Values that may be recomputed instead of being kept."""
    external: frozenset[int]
    """Storages that are there before the step: keeping them costs nothing."""

    @classmethod
    def of(cls, graph: Graph) -> Forward:
        owners: dict[int, tuple[int, ...]] = {}

        def owners_of(values: Iterable[int]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(owner for value in values for owner in owners.get(value, (value,))))

        ops: list[Op] = []
        operands: dict[int, tuple[int, ...]] = {}
        readers: dict[int, list[int]] = {}
        for op in graph.ops:
            if not op.forward:
                continue
            reads = owners_of(op.reads)
            if op.kind is OpClass.VIEW:
                owners.update((written, reads) for written in op.writes if written is not None)
                continue
            ops.append(op)
            operands[op.id] = reads
            for read in reads:
                readers.setdefault(read, []).append(op.id)
        _, saved = order_backward(graph)
        return cls(
            graph=graph,
            ops=tuple(ops),
            operands=operands,
            readers=readers,
            needed=frozenset(value for value in saved if graph.values[value].producer is not None),
            returned=frozenset(value for output in graph.returned for value in owners_of([output])),
            droppable=_not_drawn(graph, recomputable(graph)),
            external=frozenset(graph.external),
        )

    def bytes(self, value: int) -> int:
        """What keeping a value costs."""
        storage = self.graph.values[value].storage
        return 0 if storage is None or storage in self.external else self.graph.storages[storage].bytes

    def results(self, op: int) -> tuple[int, ...]:
        return tuple(value for value in self.graph.ops[op].writes if value is not None)

    def producer(self, value: int) -> int | None:
        return self.graph.values[value].producer

    def recomputed(self, dropped: Collection[int]) -> frozenset[int]:
        """Those of the dropped values that backward comes to: it needs them, or needs what is made from them."""
        reached: set[int] = set()
        pending = list(self.needed)
        while pending:
            value = pending.pop()
            if value in dropped and value not in reached:
                reached.add(value)
                producer = self.producer(value)
                assert producer is not None
                pending.extend(self.operands[producer])
        return frozenset(reached)


def _not_drawn(graph: Graph, values: frozenset[int]) -> frozenset[int]:
    """The published strategies draw nothing again."""
    drawn = {value for op in graph.ops if op.kind is OpClass.RANDOM for value in op.writes}
    return values - drawn
