"""Echo: Compiler-based GPU Memory Footprint Reduction for LSTM RNN Training (Zheng, Vijaykumar, Pekhimenko, ISCA 2020).

Cheap operators run again in backward, matrix products and convolutions never do. A heavy operator still does not
bar the way: its gradient asks for its operands, not for its result, so an operand can be recomputed without it. What
is worth recomputing is decided by bytes: a group of operators that read the same tensors is weighed as one, all its
results against all the operands that only it would keep, so that a hundred attention steps over the same encoder
states are seen as small inputs with large middles.

The paper's last two steps need no code here. Gradients of heavy operators read the values that were recomputed, and
each of those is made right before its first use in backward, because the scheduler that takes the dropped values
works so for every strategy.

Shortcomings: greedy, and blind behind the frontier (a wide middle with a narrow end is recomputed from its operands
even where keeping the end would take less); counts bytes kept, not the peak, nor the memory in which backward
recomputes a long chain, as of the additions of a ResNet; cheap is a class, not a time; heavy operators stay out of
reach, so the footprint never falls below their results that are needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from encore.graph import Graph, OpClass
from encore.plan.strategies.carried import carried_state
from encore.plan.strategies.forward import Forward

NEVER_AGAIN = frozenset({torch.ops.aten.embedding, torch.ops.aten._embedding_bag})
"""Gathers from large tables: cheap by class, but Echo does not recompute them."""

Subgraph = frozenset[int]
"""Operators that are judged together."""


def echo(graph: Graph) -> frozenset[int]:
    """Values that backward recomputes."""
    forward = Forward.of(graph)
    recomputable = echo_recomputable(forward)
    recomputable -= carried_state(forward, recomputable)
    subgraphs = echo_close(forward, echo_partition(forward, recomputable))
    again = [op for subgraph in subgraphs for op in echo_prune(forward, subgraph)]
    return forward.recomputed({value for op in again for value in forward.results(op)} & forward.droppable)


def echo_recomputable(forward: Forward) -> frozenset[int]:
    """Operators that may run again, by their class: cheap ones, less those that gather from a table."""
    return frozenset(
        op.id
        for op in forward.ops
        if op.kind is OpClass.CHEAP
        and getattr(op.target, "overloadpacket", None) not in NEVER_AGAIN
        and any(value in forward.droppable for value in forward.results(op.id))
    )


def echo_partition(forward: Forward, recomputable: Collection[int]) -> list[Subgraph]:
    """Walk backwards from a worklist of heads; recomputable operators join the subgraph of the head.

    Echo's first heads are the outputs, and an operator that cannot run again becomes a head whose operands are walked
    in turn. The joint graph says which of those operands a gradient will really ask for: the values backward reads are
    the heads, so no operator joins whose copy nothing would read. Where two walks meet, their subgraphs share operands
    and closing would join them; they become one at once, and each operator is visited once.
    """
    sets = _Sets()
    for head in sorted(forward.needed):
        reached: int | None = None
        pending = [head]
        while pending:
            value = pending.pop()
            op = forward.producer(value)
            if op is None or op not in recomputable or value not in forward.droppable:
                continue
            if op not in sets:
                pending.extend(forward.operands[op])
            sets.join(op, op if reached is None else reached)
            reached = op
    return sets.all()


def echo_close(forward: Forward, subgraphs: Iterable[Subgraph]) -> list[Subgraph]:
    """Join subgraphs that read the same tensor, until none do.

    Whether the tensor can be freed depends on all of its readers, so they must be judged together. What was there
    before the step is never freed, and joins nothing.
    """
    sets = _Sets()
    reader: dict[int, int] = {}
    for subgraph in subgraphs:
        first = min(subgraph)
        for op in subgraph:
            sets.join(op, first)
            for value in forward.operands[op]:
                if forward.bytes(value):
                    sets.join(op, reader.setdefault(value, op))
    return sets.all()


def echo_prune(forward: Forward, subgraph: Subgraph) -> frozenset[int]:
    """Walk forwards and keep results where that takes no more than keeping operands; what remains runs again.

    The frontier is made of operators whose operands are all kept. Those that share operands form a group. To run it
    again, all its operands are kept; to keep its results, the needed results are, and the operands that something
    else still asks for: backward itself, or an operator that is not in the group and runs again. The latter are kept
    either way and cancel out, which leaves what is *released* against what is *allocated*. On a tie the results are
    kept: as many bytes, and nothing to run. That moves the frontier on, until nothing changes.

    What parameters and inputs alone make (a mask, a cast weight) takes nothing when it is recomputed. It always is,
    and the frontier starts behind it.
    """
    frontier = _Frontier(forward, subgraph)
    kept: set[int] = set()
    arrived = [op for op in sorted(subgraph - frontier.free) if not frontier.missing[op]]
    while arrived:
        groups = frontier.group(arrived)
        arrived = []
        for group in groups:
            if group.released >= group.allocated:
                kept.update(group.ops)
                arrived += frontier.pass_over(group)
    return subgraph - kept


@dataclass(slots=True, eq=False)
class _Group:
    """Operators of the frontier that share operands, with what keeping their results would release and allocate."""

    ops: list[int]
    operands: list[int] = field(default_factory=list)
    released: int = 0
    allocated: int = 0


class _Frontier:
    """The groups at the frontier of a subgraph. They only ever grow, and their sums with them, so that moving the
    frontier over the whole subgraph takes time in proportion to the operands."""

    def __init__(self, forward: Forward, subgraph: Subgraph) -> None:
        self.forward = forward
        self.free: set[int] = set()
        """Operators that need nothing but what is there before the step."""
        self.made_here = {value for op in subgraph for value in forward.results(op)} & forward.droppable
        for op in sorted(subgraph):
            if not any(map(self._size, forward.operands[op])):
                self.free.add(op)
                self.made_here.difference_update(forward.results(op))
        values = self.made_here.union(*(filter(self._size, forward.operands[op]) for op in subgraph))
        self.readers = {value: [op for op in forward.readers.get(value, ()) if op in subgraph] for value in values}
        self.missing = {op: sum(value in self.made_here for value in forward.operands[op]) for op in subgraph}
        """By operator: operands that are not kept so far."""
        self.elsewhere = {value: len(readers) for value, readers in self.readers.items()}
        """By value: readers that the frontier has not come to."""
        self.group_of: dict[int, _Group] = {}
        """By operand: the group that reads it."""

    def group(self, arrived: Iterable[int]) -> list[_Group]:
        """Put operators that arrive at the frontier into groups; returns the groups that changed."""
        changed: dict[_Group, None] = {}
        for op in arrived:
            group = _Group([op], allocated=sum(self.forward.bytes(value) for value in self._wanted(op)))
            for value in self.forward.operands[op]:
                size = self._size(value)
                if not size:
                    continue
                others = self.group_of.get(value)
                if others is None:
                    self.group_of[value] = group
                    group.operands.append(value)
                elif others is not group:
                    changed.pop(others, None)
                    group = self._merge(group, others)
                self.elsewhere[value] -= 1
                if not self.elsewhere[value] and not self._held_anyway(value):
                    group.released += size
            changed[group] = None
        return list(changed)

    def pass_over(self, group: _Group) -> list[int]:
        """The group's results are kept: leave it behind; returns the operators that arrive by that."""
        for value in group.operands:
            del self.group_of[value]
        arrived: list[int] = []
        for op in group.ops:
            for value in self._wanted(op):
                for reader in self.readers[value]:
                    self.missing[reader] -= 1
                    if not self.missing[reader]:
                        arrived.append(reader)
        return arrived

    def _size(self, value: int) -> int:
        """What keeping an operand costs."""
        return 0 if self.forward.producer(value) in self.free else self.forward.bytes(value)

    def _held_anyway(self, value: int) -> bool:
        """Return whether others than operators that run again read it."""
        return value in self.forward.needed or value in self.forward.returned

    def _wanted(self, op: int) -> list[int]:
        """Results that backward reads, or an operator that runs again."""
        results = (value for value in self.forward.results(op) if value in self.made_here)
        return [value for value in results if value in self.forward.needed or self.readers[value]]

    def _merge(self, one: _Group, other: _Group) -> _Group:
        small, large = sorted((one, other), key=lambda group: len(group.operands))
        large.ops += small.ops
        large.operands += small.operands
        large.released += small.released
        large.allocated += small.allocated
        self.group_of.update(dict.fromkeys(small.operands, large))
        return large


class _Sets:
    """Disjoint sets of operators that can be joined."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def __contains__(self, op: int) -> bool:
        return op in self._parent

    def join(self, one: int, other: int) -> None:
        self._parent[self._root(one)] = self._root(other)

    def all(self) -> list[Subgraph]:
        members: dict[int, list[int]] = {}
        for op in list(self._parent):
            members.setdefault(self._root(op), []).append(op)
        return [frozenset(ops) for ops in members.values()]

    def _root(self, op: int) -> int:
        parent = self._parent
        parent.setdefault(op, op)
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op
