"""The sizes and types of results whose fake kernels return wrong ones.

oneDNN's recurrent layer returns a workspace for its backward: gates, states and room for their
gradients, each rounded up to a page. PyTorch's fake kernel returns an empty tensor for it. The layout below was
derived from the sizes of oneDNN v3.12, and tests compare it with the real operator.

Reduced losses are computed element by element into their result, which then shrinks to a scalar and keeps the memory.
The bag of every index that `_embedding_bag` returns is computed with one element more and shrinks as well, and so do
the sizes of bags if the last offset is included.

On a CPU, normalisations of narrow tensors keep their statistics in the type of their weights, if that is wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from encore.graph.values import Ref, Value

aten = torch.ops.aten
PAGE = 4096
LSTM_MODE = 2


SHRINKING_LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)


BAG_OF_INDEX, BAG_SIZES, INCLUDE_LAST_OFFSET = 1, 2, 7
"""Results of `_embedding_bag` that are one element shorter than their memory, and the flag of the second."""


def true_bytes(target: Any, args: Sequence[Any], values: Sequence[Value], results: Sequence[Any]) -> dict[int, int]:
    """Bytes by result position, for the results whose fake tensor is wrong."""
    if target is aten.mkldnn_rnn_layer.default:
        return _onednn_lstm(args, values)
    if target in SHRINKING_LOSSES and isinstance(args[0], Ref):
        return {0: values[args[0].value].bytes}
    if target is aten._embedding_bag.default:
        longer = [BAG_OF_INDEX] if results[BAG_OF_INDEX].numel() else []
        longer += [BAG_SIZES] if len(args) > INCLUDE_LAST_OFFSET and args[INCLUDE_LAST_OFFSET] else []
        return {position: (results[position].numel() + 1) * results[position].element_size() for position in longer}
    return {}


NARROW = 2
"""Bytes of a number of a narrow type."""
NORMALISATIONS: Mapping[Any, tuple[int, ...]] = {
    aten.native_layer_norm.default: (2, 3),
    aten.native_group_norm.default: (1, 2),
    aten._native_batch_norm_legit_functional.default: (1, 2, 3, 4),
    aten._native_batch_norm_legit.default: (1, 2, 3, 4),
    aten._native_batch_norm_legit.no_stats: (1, 2),
    aten.native_batch_norm.default: (1, 2, 3, 4),
}
"""Weight, bias and running statistics among their arguments; their results 1 and 2 are statistics."""


def true_types(
    target: Any, args: Sequence[Any], values: Sequence[Value], results: Sequence[Any]
) -> dict[int, torch.dtype]:
    """Types by result position, for the results whose fake tensor has a wrong one."""
    if target not in NORMALISATIONS or results[0].device.type != "cpu" or results[0].dtype.itemsize != NARROW:
        return {}
    given = (args[place] for place in NORMALISATIONS[target] if place < len(args))
    wide = any(isinstance(one, Ref) and values[one.value].dtype is torch.float32 for one in given)
    return dict.fromkeys((1, 2), torch.float32) if wide else {}


def _onednn_lstm(args: Sequence[Any], values: Sequence[Value]) -> dict[int, int]:
    source, mode, hidden = args[0], args[9], args[10]
    assert isinstance(source, Ref)
    steps, batch, features = values[source.value].shape  # time comes first here, also with batch_first
    dtype = values[source.value].dtype
    if mode != LSTM_MODE or dtype is None:
        return {}
    return {3: onednn_lstm_workspace(steps, batch, features, hidden, dtype.itemsize)}


def onednn_lstm_workspace(steps: int, batch: int, features: int, hidden: int, itemsize: int = 4) -> int:
    """Bytes of the workspace of one layer and direction. Activations have the type of the input, gradients float32."""
    widest = max(features, hidden)
    return (
        _pages(itemsize * steps * batch * _leading_dimension(4 * hidden, itemsize))  # gates
        + _pages(itemsize * steps * batch * _leading_dimension(hidden, itemsize))  # h before projection
        + _pages(2 * itemsize * (steps + 1) * batch * _leading_dimension(widest, itemsize))  # states between layers
        + 2 * _pages(8 * (steps + 1) * batch * _leading_dimension(widest, 4))  # their gradients
        + _pages(2 * itemsize * (steps + 1) * batch * hidden)  # c
        + _pages(8 * (steps + 1) * batch * hidden)  # its gradient
    )


def _leading_dimension(elements: int, itemsize: int) -> int:
    """oneDNN pads rows to a cache line and away from multiples of 256 elements."""
    line = 64 // itemsize
    padded = -(-elements // line) * line
    return padded + line if padded % 256 == 0 else padded


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
