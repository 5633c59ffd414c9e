"""Additive attention becomes `encore::additive_scores`: of all pairs of a query and a key, only scores are in memory.

The middle, `H` numbers for every pair, is written several times by plain operators, and one of those is kept for
backward or recomputed there. The operator never writes it, forward or backward (`encore.rnn.scores`), which is faster,
too, since tanh costs less than the memory it would be kept in. Where several attend to the same keys, each adds to
their gradient in place.

Whether it pays for a shape is timed; scores come out with other roundings.
"""

from __future__ import annotations

from typing import Any

import torch

from encore.graph import Graph, Op
from encore.graph.editor import Editor
from encore.graph.values import Ref, is_contiguous
from encore.rewrite.additive_scores import AdditiveScores, find_additive_scores
from encore.rewrite.judge import Judge
from encore.rewrite.queries import exported, has_memory_to_itself

aten = torch.ops.aten
RESULTS = ("keys", "query", "weight", "bias", "norm_weight", "norm_bias")
"""What the operator of backward returns, in order."""


def apply(graph: Graph, judge: Judge) -> Graph:
    """The graph with attention's scores in operators of their own where that pays."""
    editor = Editor(graph)
    worthwhile = [found for found in find_additive_scores(graph) if judge.scoring_pays(found, _dtype(graph, found))]
    going = {op.id for found in worthwhile for op in found.backward}
    for found in worthwhile:
        _Replacement(editor, found, going).make()
    return editor.finish()


def _dtype(graph: Graph, found: AdditiveScores) -> torch.dtype:
    dtype = graph.values[found.query].dtype
    assert dtype is not None
    return dtype


class _Replacement:
    """One replacement by operators. What made the middle is removed with its last reader."""

    def __init__(self, editor: Editor, found: AdditiveScores, going: set[int]) -> None:
        self.editor = editor
        self.values = editor.graph.values
        self.found = found
        self.going = going
        """Operators of backward that will not be there any more."""
        self.dtype = _dtype(editor.original, found)
        self.operands: tuple[Any, ...] = ()

    def make(self) -> None:
        self._forward()
        if self.found.grad is not None:
            self._backward()

    def _forward(self) -> None:
        found, dot = self.found, self.found.dot
        batch, queries, keys = found.shape
        norm: tuple[Any, ...] = (None, None) if found.norm is None else found.norm.args[2:4]
        self.operands = (
            self.editor.viewed(dot, found.query, (batch, queries, found.hidden)),
            self.editor.viewed(dot, found.keys, (batch, keys, found.hidden)),
            self.editor.viewed(dot, found.weight, (found.hidden,)),
            None if found.bias is None else self.editor.viewed(dot, found.bias, (found.hidden,)),
            *norm,
            found.eps,
        )
        op = self.editor.op_after(
            dot, f"{found.tanh.name}_scores", torch.ops.encore.additive_scores.default, self.operands
        )
        op.module, op.source = found.tanh.module, found.tanh.source
        made = self.editor.result(op, found.shape, self.dtype, "cpu")
        if found.offset is None:
            self.editor.become(op, found.scores, made)
        else:
            plain = self.editor.viewed(op, made, self.values[found.scores].shape)
            add = self.editor.op_after(op, f"{dot.name}_offset", aten.add.Tensor, (plain, Ref(found.offset)))
            self.editor.adopt(add, found.scores)

    def _backward(self) -> None:
        found = self.found
        assert found.grad is not None
        first = min(found.backward, key=lambda op: op.id)
        grad = self.editor.viewed(first, found.grad, found.shape)
        wanted = found.gradients
        onto, total = self._onto(first)
        weights = any(name in wanted for name in RESULTS[2:])
        needs = ("query" in wanted, "keys" in wanted, weights)
        op = self.editor.op_after(
            first, f"{found.tanh.name}_scores_backward", torch.ops.encore.additive_scores_backward.default,
            (onto, grad, *self.operands, *needs),
        )  # fmt: skip
        op.module, op.source, op.returns_tuple = found.tanh.module, found.tanh.source, True
        batch, queries, keys = found.shape
        sizes = {"keys": (batch, keys, found.hidden), "query": (batch, queries, found.hidden)}
        present = {"keys": needs[1], "query": needs[0], "weight": weights, "bias": weights and found.bias is not None}
        affine = (None, None) if found.norm is None else found.norm.args[2:4]
        present |= {name: weights and one is not None for name, one in zip(RESULTS[4:], affine, strict=True)}
        views = []
        for name in RESULTS:
            shape = sizes.get(name, (found.hidden,))
            leaves = total if name == "keys" and total is not None else wanted.get(name)
            if not present[name]:
                op.writes = (*op.writes, None)
            elif leaves is not None and self.values[leaves].shape == shape and is_contiguous(self.values[leaves]):
                self.editor.adopt(op, leaves)
            else:
                made = self.editor.result(op, shape, self.dtype, "cpu")
                self.values[made].name += f"_{name}"
                views += [(leaves, made)] if leaves is not None else []
        for leaves, made in views:
            self.editor.become(op, leaves, made)

    def _onto(self, first: Op) -> tuple[Ref | None, int | None]:
        """What the gradient of the keys is added to, and the sum, where that can be done in place: the other addend
        was there before, fills memory of its own, and nothing else reads it."""
        graph = self.editor.original
        gradient = self.found.gradients.get("keys")
        readers = [] if gradient is None else self._readers(gradient)
        if gradient is None or gradient in exported(graph) or len(readers) != 1:
            return None, None
        (add,) = readers
        if add.target is not aten.add.Tensor or add.kwargs or len(add.reads) != 2 or add.forward:
            return None, None
        (other,) = (value for value in add.reads if value != gradient)
        maker, value, mine = graph.producer(other), graph.values[other], graph.values[gradient]
        before = maker is not None and not maker.forward and maker.id < first.id
        alike = value.shape == mine.shape and value.dtype == mine.dtype and is_contiguous(value) and is_contiguous(mine)
        shape = (self.found.shape[0], self.found.shape[2], self.found.hidden)
        free = self._readers(other) == [add] and other not in exported(graph) and has_memory_to_itself(graph, other)
        if not (before and alike and free and value.shape == shape and has_memory_to_itself(graph, gradient)):
            return None, None
        return Ref(other), add.writes[0]

    def _readers(self, number: int) -> list[Op]:
        """The operators that still read a value."""
        graph = self.editor.original
        return [graph.ops[reader] for reader in graph.values[number].readers if reader not in self.going]
