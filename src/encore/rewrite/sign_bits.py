"""A map is let go before the gradient that passes through its ReLU is there: a bit an element stays; lossless.

A convolution that follows a ReLU reads the ReLU's output for the gradient of its weight, and the ReLU's own backward
reads it once more, for signs, when the gradient of the convolution's input has been made. In between, the map would
stand beside two gradients of its size: that is where the step of many image classifiers peaks. Here its signs are taken
as soon as the weight's gradient is there (`split_convolutions`), and the map, or what was decoded in its place, goes.
LeakyReLU and, where the very bits are not asked for (PyTorch's formula is uneven about NaN), hardtanh and ReLU6 go the
same way. `sign_masks` has dealt with maps of which nothing but signs is needed.
"""

from __future__ import annotations

from typing import Any

import torch

from encore.codecs.bits import ENCODE_INSIDE, ENCODE_SIGN, FLOATS, MASKED
from encore.codecs.native import is_compiled
from encore.graph import Graph, Op, OpClass
from encore.graph.editor import Editor
from encore.graph.needs import BackwardNeeds
from encore.graph.ops import is_fusible
from encore.graph.values import Ref, span_bytes
from encore.rewrite.matmuls import device_of
from encore.rewrite.trial import Trial

aten = torch.ops.aten
MASK = 10
FEW = 1 << 16
"""Bytes of a map that is not worth two operators of our own."""


def sign_bits(graph: Graph, *, exact: bool) -> Graph:
    """The graph with such signs taken early."""
    editor, needs = Editor(graph), BackwardNeeds(graph)
    trial = Trial(editor)
    for op in graph.ops:
        by_bits = _by_bits(op, exact)
        maker = _convolution_before(graph, op) if by_bits else None
        if by_bits and maker is not None and _stands_in_between(graph, needs, op, maker):
            encode, sides, slope = by_bits
            gradient, map_ = op.args[:2]
            name = graph.values[map_.value].name
            signs = trial.before(maker, f"{name}_signs_{op.id}", encode, (map_, *sides))
            masked = editor.op_after(op, f"{op.name}_by_bits", MASKED, (gradient, Ref(signs), *slope))
            (result,) = op.writes
            assert result is not None
            editor.adopt(masked, result)
    return editor.finish()


def _by_bits(op: Op, exact: bool) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]] | None:
    """What takes a formula's signs, by which constants, and what the reader of bits is told beside them."""
    if op.forward or op.kwargs:
        return None
    if op.target is aten.threshold_backward.default and op.args[2] == 0:
        return ENCODE_SIGN, (), ()
    if op.target is aten.leaky_relu_backward.default and op.args[2] != 0:
        return ENCODE_SIGN, (False,), (op.args[2],)
    if op.target is aten.hardtanh_backward.default and not exact:
        return ENCODE_INSIDE, tuple(op.args[2:]), ()
    return None


def _convolution_before(graph: Graph, op: Op) -> Op | None:
    """Whose gradient passes through this ReLU: that of a convolution's input, made by itself."""
    maker = graph.producer(op.args[0].value)
    if maker is None or maker.target is not aten.convolution_backward.default:
        return None
    return maker if maker.args[MASK] == [True, False, False] else None


def _stands_in_between(graph: Graph, needs: BackwardNeeds, op: Op, maker: Op) -> bool:
    """Is the map held for its signs alone when the convolution's gradient is made, and laid out like it? Formulas that
    would become part of a kernel with their readers are left to it."""
    gradient, map_ = (graph.values[operand.value] for operand in op.args[:2])
    (result,) = op.writes
    owner = graph.producer(map_.id)
    if result is None or map_.storage is None or map_.dtype not in FLOATS or map_.bytes < FEW:
        return False
    if owner is None or not owner.forward or owner.kind is OpClass.VIEW or map_.storage in needs.held:
        return False
    others = [reading.op.id for reading in needs.of.get(map_.storage, ()) if reading.op.id != op.id]
    if not others or max(others) > maker.id:
        return False
    alike = gradient.stride == map_.stride == graph.values[result].stride and gradient.dtype is map_.dtype
    if not alike or span_bytes(map_) != map_.bytes or not is_compiled(device_of(graph, map_.id)):
        return False
    return not any(is_fusible(graph.ops[reader].target) for reader in graph.values[result].readers)
