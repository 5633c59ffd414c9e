"""Recurrent operators that keep less: `keep=K` in place of `keep=0`.

As it is captured, an operator keeps the gates of every step (`rnn/lstm.py`, `rnn/gru.py`). With `keep=K` it keeps c
every K steps, or nothing at all beside its output, and its backward builds the gates again, a chunk at a time. Both
operators change together; what they take aside changes with K. The gates come out of other products, so that the last
bits may differ: the eager lowering leaves operators as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

import encore.rnn  # noqa: F401 - registers encore::*
from encore.graph import Graph, Op
from encore.graph.on_shapes import call_on_shapes
from encore.graph.values import block_bytes, contiguous_strides
from encore.rnn.tuning import lean_steps
from encore.schedule.choice import Stashed

BACKWARD_OF: dict[Any, Any] = {
    torch.ops.encore.lstm_forward.default: torch.ops.encore.lstm_backward.default,
    torch.ops.encore.gru_forward.default: torch.ops.encore.gru_backward.default,
}
RESIDUE = {torch.ops.encore.lstm_forward.default: 3, torch.ops.encore.gru_forward.default: 2}
"""The first result that is there for backward alone."""
KEEPS_STATES = frozenset({torch.ops.encore.lstm_forward.default})
"""Operators that keep a state every K steps; to others, K is no more than a yes."""
EVERY = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A recurrent operator that keeps its gates, with its backward."""

    forward: Op
    backward: Op
    residue: tuple[int, ...]
    """What it keeps for backward: gates first."""

    @property
    def output(self) -> int:
        output = self.forward.writes[0]
        assert output is not None
        return output

    def steps(self, graph: Graph) -> int:
        """How many steps the sequence has."""
        x, batch_sizes = (_argument(self.forward, name) for name in ("x", "batch_sizes"))
        return graph.values[(x if batch_sizes is None else batch_sizes).value].shape[0]

    def intervals(self, graph: Graph) -> tuple[int, ...]:
        """The K that may be worth it: from few steps between kept states, for a small workspace, to large products."""
        steps = self.steps(graph)
        lean = min(steps, lean_steps(*graph.values[_argument(self.forward, "h0").value].shape))
        if self.forward.target not in KEEPS_STATES:
            return (lean,)
        return tuple(sorted({lean, *(every for every in EVERY if every < steps)}))


def recurrent(graph: Graph) -> list[Recurrent]:
    """The recurrent operators that could keep less."""
    found = []
    for op in graph.ops:
        if op.forward and op.target in BACKWARD_OF and _argument(op, "keep") == 0:
            residue = tuple(value for value in op.writes[RESIDUE[op.target] :] if value is not None)
            readers = {reader for value in residue for reader in graph.values[value].readers}
            if len(residue) == len(op.writes) - RESIDUE[op.target] and len(readers) == 1:
                (backward,) = (graph.ops[reader] for reader in readers)
                if backward.target is BACKWARD_OF[op.target] and not backward.forward:
                    found.append(Recurrent(op, backward, residue))
    return found


def keep_less(graph: Graph, stashed: Iterable[Stashed]) -> Graph:
    """The graph in which these operators keep a state every so many steps, and their backwards build the rest again."""
    every = {one.output: one.every for one in stashed}
    if not every:
        return graph
    values = [value.copy(value.readers) for value in graph.values]
    storages, ops = [storage.copy() for storage in graph.storages], list(graph.ops)
    for one in recurrent(graph):
        if one.output not in every:
            continue
        for op in (one.forward, one.backward):
            ops[op.id] = dataclasses.replace(op, args=_keeping(op, every[one.output]))
        for number, shape in zip(one.residue, _shapes(graph, ops[one.forward.id])[-len(one.residue) :], strict=True):
            value = values[number]
            assert value.storage is not None
            assert value.dtype is not None
            storage = storages[value.storage]
            value.shape, value.stride = shape, contiguous_strides(shape)
            value.bytes = torch.Size(shape).numel() * value.dtype.itemsize
            storage.bytes = block_bytes(value.bytes, storage.device)
    return dataclasses.replace(graph, values=values, storages=storages, ops=ops)


@functools.cache
def _place(target: Any, name: str) -> int:
    return [argument.name for argument in target._schema.arguments].index(name)


def _argument(op: Op, name: str) -> Any:
    return op.args[_place(op.target, name)]


def _keeping(op: Op, every: int) -> tuple[Any, ...]:
    place = _place(op.target, "keep")
    return (*op.args[:place], every, *op.args[place + 1 :])


def _shapes(graph: Graph, op: Op) -> list[tuple[int, ...]]:
    """Of all results of an operator, as its operands are."""
    return [tuple(result.shape) for result in call_on_shapes(graph, op, op.target)]
