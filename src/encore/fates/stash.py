"""Stash: a recurrent operator keeps less for its backward, `keep=K` in place of `keep=0`.

As it is captured, an operator keeps the gates of every step (`rnn/lstm.py`, `rnn/gru.py`). With `keep=K` it keeps c
every K steps, or nothing at all next to its output, and its backward recomputes the gates, a chunk at a time. Both
operators change together; their workspaces change with K. The gates come out of other products, so that the last
bits may differ: the eager lowering leaves operators as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

import encore.rnn  # noqa: F401 - registers encore::*
from encore.errors import PlanError
from encore.fates.fate import Decision, Fate, Given, OpSeconds, Terms
from encore.graph import Graph, Op
from encore.graph.editor import Editor
from encore.graph.on_shapes import call_on_shapes, shaped_arguments
from encore.rnn.tuning import lean_steps

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
class Stash(Fate):
    """Have the recurrent operator that makes it keep less, and recompute it inside of its backward."""

    kind: ClassVar[str] = "stash"
    in_place: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, type]] = {"operator": str, "every": int}
    value: int
    """The first result of the operator, which stands for it; its own fate may be another one."""
    every: int
    """Steps between two states that are kept."""
    shrinks: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    workspaces: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(value for value, _ in self.shrinks)

    @property
    def label(self) -> str:
        return f"stash {self.every}"

    @property
    def code(self) -> str:
        return f"every {self.every}"

    def decisions(self, before: Graph, after: Graph, ops: Sequence[Op], seconds: OpSeconds) -> Mapping[int, Decision]:
        (one,) = (one for one in recurrent(before) if one.output == self.value)
        lean = keep_less(before, [self])
        cost = sum(seconds(lean, lean.ops[op.id]) - seconds(before, op) for op in (one.forward, one.backward))
        found = {}
        for value in one.residue:
            kept = after.bytes_of(value)
            why = f"kept every {self.every} steps" if kept else "recomputed in backward from the outputs"
            whole = before.bytes_of(value), before.values[value].shape
            found[value] = Decision(self, why, max(0.0, cost) / len(one.residue), kept, whole)
        return found

    @classmethod
    def change_operators(cls, graph: Graph, fates: Sequence[Stash]) -> Graph:
        return keep_less(graph, fates)

    @classmethod
    def candidates(cls, graph: Graph, values: Collection[int], terms: Terms, found: Sequence[Fate]) -> list[Stash]:
        """Every way in which recurrent operators could keep less of these values, smallest intervals first. What is
        recomputed rounds differently."""
        layers = [] if terms.exact else [one for one in recurrent(graph) if set(one.residue) <= set(values)]
        stashes = []
        intervals = {every for one in layers for every in one.intervals(graph)}
        for every in sorted(intervals if terms.labels is None else _nearest(intervals, terms.labels)):
            chosen = [one for one in layers if every in one.intervals(graph)]
            less = keep_less(graph, [cls(one.output, every) for one in chosen])
            for one in chosen:
                shrinks = tuple((value, less.bytes_of(value)) for value in one.residue)
                pairs = [(op, less.ops[op.id]) for op in (one.forward, one.backward)]
                more = tuple((op.id, terms.workspace(less, lean) - terms.workspace(graph, op)) for op, lean in pairs)
                extra = sum(terms.seconds(less, lean) - terms.seconds(graph, op) for op, lean in pairs)
                stashes.append(cls(one.output, every, shrinks, more, max(0.0, extra)))
        return stashes

    @classmethod
    def allowed_values(cls, graph: Graph) -> frozenset[int]:
        return frozenset(value for op in graph.ops if op.forward for value in op.writes if value is not None)

    @classmethod
    def read(cls, graph: Graph, value: int, entry: Mapping[str, Any], given: Given) -> Stash:
        every = entry["every"]
        if any(one.output == value and 1 <= every <= one.steps(graph) for one in recurrent(graph)):
            return cls(value, every)
        raise PlanError(
            f"the plan has the operator of {entry['operator']} keep a state every {every} steps, which it cannot; "
            "plan anew"
        )


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


def _nearest(intervals: Collection[int], labels: Collection[str]) -> set[int]:
    """For every interval that a label names, the nearest of these."""
    named = [int(label.removeprefix("stash ")) for label in labels if label.startswith("stash ")]
    return {min(intervals, key=lambda every: abs(math.log(every / one))) for one in named} if intervals else set()


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


def keep_less(graph: Graph, stashes: Iterable[Stash]) -> Graph:
    """The graph in which these operators keep a state every so many steps, and their backwards recompute the rest."""
    every = {one.value: one.every for one in stashes}
    editor = Editor(graph)
    for one in recurrent(graph) if every else ():
        if one.output not in every:
            continue
        for op in (one.forward, one.backward):
            editor.call_with(op, _keeping(op, every[one.output]))
        forward = editor.graph.ops[one.forward.id]
        shapes = _shapes(forward.target, shaped_arguments(editor.graph, forward))
        for number, shape in zip(one.residue, shapes[-len(one.residue) :], strict=True):
            editor.resize(number, shape)
    return editor.finish_in_place()


@functools.cache
def _place(target: Any, name: str) -> int:
    return [argument.name for argument in target._schema.arguments].index(name)


def _argument(op: Op, name: str) -> Any:
    return op.args[_place(op.target, name)]


def _keeping(op: Op, every: int) -> tuple[Any, ...]:
    place = _place(op.target, "keep")
    return (*op.args[:place], every, *op.args[place + 1 :])


@functools.lru_cache(maxsize=4096)
def _shapes(target: Any, arguments: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """Of all results of an operator, as its operands are."""
    return tuple(tuple(result.shape) for result in call_on_shapes(target, arguments))
