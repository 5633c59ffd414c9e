"""Backward reads an activation that is kept anyway instead of a second one with the same facts; lossless.

Two activations have the same facts where one is a part of the other (those that `cat` concatenates and are not needed
otherwise), or where one lies on the same side of a constant as the other (what went into a ReLU6 and what came out),
and no more than the side is asked. The formula reads its part where it lies; what would need a copy of it is left
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.editor import Editor
from encore.graph.needs import BackwardNeeds, Need, Reading
from encore.graph.values import Ref, Value
from encore.rewrite.op_builder import OpBuilder
from encore.rewrite.queries import represents, result_of

aten = torch.ops.aten
ANY_LAYOUT = frozenset({aten.threshold_backward.default, aten.leaky_relu_backward.default, aten.mul.Tensor})
"""Formulas that make the same of an element wherever it lies."""
ANY_LAYOUT_BUT_FOR_ROUNDING = frozenset({
    aten.hardtanh_backward.default, aten.hardsigmoid_backward.default, aten.tanh_backward.default,
    aten.sigmoid_backward.default, aten.gelu_backward.default, aten.silu_backward.default,
})  # fmt: skip
"""Formulas whose vector loop and whose last few elements may differ in the last bit, or about NaN."""


def _same_settings(map_: Value, forward: Op, backward: Op) -> bool:
    """Between the same two constants, which what lies beyond becomes: not rounded to the activation's type."""
    limits = (*forward.args[1:], *(-1.0, 1.0)[len(forward.args) - 1 :])
    return tuple(backward.args[2:4]) == limits and all(represents(map_, limit) for limit in limits)


def _rises(map_: Value, forward: Op, backward: Op) -> bool:
    """What is above zero stays there, what is not does not come there."""
    slope = forward.args[1] if len(forward.args) > 1 else 0.01
    return bool(slope >= 0) and backward.args[2] == slope


def _replaces_by_less(map_: Value, forward: Op, backward: Op) -> bool:
    """`threshold(x, t, value)`, with nothing above `t` made of what was not."""
    _, threshold, value = forward.args
    return (
        bool(value <= threshold)
        and backward.args[2] == threshold
        and represents(map_, threshold)
        and represents(map_, value)
    )


SAME_SIDE: dict[Any, tuple[Any, Callable[[Value, Op, Op], bool]]] = {
    aten.hardtanh_backward.default: (aten.hardtanh.default, _same_settings),
    aten.leaky_relu_backward.default: (aten.leaky_relu.default, _rises),
    aten.threshold_backward.default: (aten.threshold.default, _replaces_by_less),
}
"""A formula that reads the input of its layer -> the layer's operator, and when its output would do as well."""


@dataclass(frozen=True, slots=True)
class _Twin:
    """A window on a value of forward: all of it, or what lies between two positions of a dimension."""

    value: int
    dim: int = 0
    start: int | None = None
    end: int | None = None


def apply(graph: Graph, *, exact: bool) -> Graph:
    """The graph in which activations whose facts are kept elsewhere are not kept."""
    editor = Editor(graph)
    builder = OpBuilder(editor)
    needs = BackwardNeeds(graph)
    given_up: set[int] = set()
    for storage, readings in needs.of.items():
        if storage in needs.held or any(_is_stuck(graph, storage, reading) for reading in readings):
            continue
        found: list[tuple[Reading, _Twin]] = []
        for reading in readings:
            if reading.need is not Need.SIZE:
                twins = _kept_twins(graph, needs, reading, given_up)
                found += [(reading, twin) for twin in twins if _serves(builder, reading, twin, exact)][:1]
        if found and len(found) == sum(reading.need is not Need.SIZE for reading in readings):
            given_up.add(storage)
            for reading, twin in found:
                _read(editor, reading, twin)
    return editor.finish()


def _is_stuck(graph: Graph, storage: int, reading: Reading) -> bool:
    """Views, draws and writes are not changed."""
    whole = graph.storages[storage].values[0] == reading.value
    return not whole or reading.op.kind not in (OpClass.CHEAP, OpClass.HEAVY)


def _kept_twins(graph: Graph, needs: BackwardNeeds, reading: Reading, given_up: set[int]) -> Iterator[_Twin]:
    """What forward made of a value that is kept whole in backward, and says what the reader needs to know."""
    for twin in _twins(graph, reading):
        storage = graph.values[twin.value].storage
        if storage is None or storage in given_up or not needs.may_be_read(storage):
            continue
        if needs.is_kept_whole(storage):
            yield twin


def _twins(graph: Graph, reading: Reading) -> Iterator[_Twin]:
    values = [reading.value]
    layer, would_do = SAME_SIDE.get(reading.op.target, (None, None))
    if reading.need is Need.SIGN and layer is not None and would_do is not None:
        for op in _forward_readers(graph, reading.value):
            (made,) = op.writes if len(op.writes) == 1 else (None,)
            if op.target is layer and made is not None and would_do(graph.values[made], op, reading.op):
                yield _Twin(made)
                values.append(made)
    if reading.need is not Need.SIZE:
        for value in values:
            yield from _parts(graph, value)


def _parts(graph: Graph, value: int) -> Iterator[_Twin]:
    """Where a value lies in what it is put side by side with others."""
    for op in _forward_readers(graph, value):
        (made,) = op.writes if len(op.writes) == 1 else (None,)
        if op.target is not aten.cat.default or made is None or graph.values[made].dtype != graph.values[value].dtype:
            continue
        rank = len(graph.values[made].shape)
        dim = (op.args[1] if len(op.args) > 1 else 0) % rank
        start = 0
        for part in op.args[0]:
            shape = graph.values[part.value].shape
            if len(shape) != rank:  # an empty one, which `cat` lets pass
                break
            if part.value == value:
                yield _Twin(made, dim, start, start + shape[dim])
                break
            start += shape[dim]


def _forward_readers(graph: Graph, value: int) -> list[Op]:
    return [op for reader in graph.values[value].readers if (op := graph.ops[reader]).forward]


def _serves(builder: OpBuilder, reading: Reading, twin: _Twin, exact: bool) -> bool:
    """Return whether the formula makes the same of the twin, where it lies, and leaves it laid out as before."""
    graph, op = builder.editor.original, reading.op
    before, now = graph.values[reading.value].stride, graph.values[twin.value].stride
    if before == now and twin.start is None:
        return True
    if op.target not in (ANY_LAYOUT if exact else ANY_LAYOUT | ANY_LAYOUT_BUT_FOR_ROUNDING) or op.kwargs:
        return False
    made = result_of(op)
    return builder.strides(op.target, op.args, {reading.value: now}) == graph.values[made].stride


def _read(editor: Editor, reading: Reading, twin: _Twin) -> None:
    value, serves = editor.graph.values[reading.value], twin.value
    if twin.start is not None:
        base = editor.graph.values[twin.value]
        window = (Ref(twin.value), twin.dim, twin.start, twin.end)
        view = editor.op_before(reading.op, f"{value.name}_part_of_{reading.op.name}", aten.slice.Tensor, window)
        serves = editor.view_result(view, twin.value, value.shape, base.stride, twin.start * base.stride[twin.dim])
    editor.read_instead(reading.op, reading.value, serves)
