"""An activation is freed before the gradient that passes through its ReLU exists: a bit an element stays; lossless.

A convolution that follows a ReLU reads the ReLU's output for the gradient of its weight, and the ReLU's own backward
reads it once more, for signs, when the gradient of the convolution's input has been computed. In between, the
activation would be kept next to two gradients of its size: that is where the step of many image classifiers peaks. Here
its signs are encoded as soon as the weight's gradient is there (`split_convolutions`), and the activation, or what was
decoded in its place, is freed. LeakyReLU and, where bit equality is not asked for (PyTorch's formula is uneven about
NaN), hardtanh and ReLU6 go the same way. `sign_masks` has dealt with activations of which only signs are needed.
"""

from __future__ import annotations

import torch

from encore.codecs.bits import ENCODE_INSIDE, ENCODE_SIGN, FLOATS, MASKED
from encore.codecs.native import is_compiled
from encore.graph import Graph, OpClass
from encore.graph.ops import is_fusible
from encore.graph.values import span_bytes
from encore.rewrite.matching import AnyTensor, Argument, Match, OpPattern
from encore.rewrite.queries import device_of, readers_of, result_of
from encore.rewrite.rules import NewOp, Rule, apply_rules

aten = torch.ops.aten
MASK = 10
"""Where backward of a convolution is asked for gradients."""
FEW = 1 << 16
"""Bytes of an activation that is not worth two operators of our own."""


def apply(graph: Graph, *, exact: bool) -> Graph:
    """The graph with such signs encoded early."""
    return apply_rules(graph, EXACT_RULES if exact else RULES)


def _is_kept_for_signs(match: Match) -> bool:
    """Return whether the activation is kept for its signs alone when the convolution's gradient is computed, and laid
    out like it. Formulas that would be fused with their readers are left to the kernel."""
    graph, needs, result = match.graph, match.scope.needs, match.graph.values[result_of(match.op)]
    gradient, activation = match.value("gradient"), match.value("activation")
    if match["convolution"].args[MASK] != [True, False, False]:
        return False
    owner = graph.producer(activation.id)
    if activation.storage is None or activation.dtype not in FLOATS or activation.bytes < FEW:
        return False
    if owner is None or not owner.forward or owner.kind is OpClass.VIEW or activation.storage in needs.held:
        return False
    others = [reading.op.id for reading in needs.of.get(activation.storage, ()) if reading.op is not match.op]
    if not others or max(others) > match["convolution"].id:
        return False
    alike = gradient.stride == activation.stride == result.stride and gradient.dtype is activation.dtype
    if not alike or span_bytes(activation) != activation.bytes or not is_compiled(device_of(graph, activation.id)):
        return False
    return not any(is_fusible(reader.target) for reader in readers_of(graph, result.id))


OPERANDS = (
    AnyTensor("gradient", OpPattern(aten.convolution_backward.default, ..., name="convolution")),
    AnyTensor("activation"),
)
SLOPE = Argument("slope", lambda slope: slope != 0)
SIGNS = NewOp(ENCODE_SIGN, AnyTensor("activation"), before="convolution")
SIGNS_WITHOUT_NAN = NewOp(ENCODE_SIGN, AnyTensor("activation"), False, before="convolution")
INSIDE = NewOp(ENCODE_INSIDE, AnyTensor("activation"), Argument("low"), Argument("high"), before="convolution")

EXACT_RULES = (
    Rule(
        OpPattern(aten.threshold_backward.default, *OPERANDS, 0, forward=False),
        NewOp(MASKED, AnyTensor("gradient"), SIGNS),
        _is_kept_for_signs,
    ),
    Rule(
        OpPattern(aten.leaky_relu_backward.default, *OPERANDS, SLOPE, ..., forward=False),
        NewOp(MASKED, AnyTensor("gradient"), SIGNS_WITHOUT_NAN, Argument("slope")),
        _is_kept_for_signs,
    ),
)
RULES = (
    *EXACT_RULES,
    Rule(
        OpPattern(aten.hardtanh_backward.default, *OPERANDS, Argument("low"), Argument("high"), forward=False),
        NewOp(MASKED, AnyTensor("gradient"), INSIDE),
        _is_kept_for_signs,
    ),
)
