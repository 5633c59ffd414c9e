"""Results whose fake kernels do not tell the truth about their size.

oneDNN's recurrent layer returns a workspace that holds what its backward needs: gates, states and room for their
gradients, each rounded up to a page. PyTorch's fake kernel returns an empty tensor for it. The layout below was
derived from the sizes that oneDNN v3.12 asks for (float32), and is checked against the real operator in the tests.

Reduced losses are computed element by element into their result, which then shrinks to a scalar and keeps the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from encore.graph.values import Ref, Value

aten = torch.ops.aten
PAGE = 4096
LSTM_MODE = 2


SHRINKING_LOSSES = (aten.mse_loss.default, aten.smooth_l1_loss.default)


def true_bytes(target: Any, args: Sequence[Any], values: Sequence[Value]) -> dict[int, int]:
    """Bytes by result position, for the results whose fake tensor is wrong."""
    if target is aten.mkldnn_rnn_layer.default:
        return _onednn_lstm(args, values)
    if target in SHRINKING_LOSSES and isinstance(args[0], Ref):
        return {0: values[args[0].value].bytes}
    return {}


def _onednn_lstm(args: Sequence[Any], values: Sequence[Value]) -> dict[int, int]:
    source, mode, hidden = args[0], args[9], args[10]
    assert isinstance(source, Ref)
    steps, batch, features = values[source.value].shape  # time comes first by now, whatever batch_first says
    if mode != LSTM_MODE:
        return {}
    return {3: onednn_lstm_workspace(steps, batch, features, hidden)}


def onednn_lstm_workspace(steps: int, batch: int, features: int, hidden: int) -> int:
    """Bytes of the workspace of one layer and direction."""
    wide = _leading_dimension(max(features, hidden))
    return (
        _pages(4 * steps * batch * _leading_dimension(4 * hidden))  # gates
        + _pages(4 * steps * batch * _leading_dimension(hidden))  # h before projection
        + 3 * _pages(8 * (steps + 1) * batch * wide)  # states between layers, and their gradients
        + 2 * _pages(8 * (steps + 1) * batch * hidden)  # c, and its gradient
    )


def _leading_dimension(elements: int) -> int:
    """oneDNN pads rows to a cache line and away from multiples of 1 KiB."""
    padded = -(-elements // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
