"""Layers and directions of a recurrent network, one operator each: `encore.nn`'s modules and captured `torch.nn` ones.

A function runs one layer in one direction. What happens between layers, and the order in which dropout draws, is
`torch.nn`'s: the same seed gives the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from encore.rnn import elman, gru, lstm  # noqa: F401  (defines the operators)
from encore.rnn.packing import dropped_rows

Layer = Callable[[Sequence[Any], Sequence[Tensor | None], Tensor | None, bool, Tensor | None], tuple[Tensor, ...]]
"""Takes input and initial states, weights (input, recurrent, their biases, projection), sizes of a packed batch,
whether it goes backwards, and resets; returns the output and the last states."""


def lstm_layer(keep: int) -> Layer:
    """An LSTM with this `keep`."""
    return lambda given, weights, sizes, reverse, resets: torch.ops.encore.lstm_forward(
        *given, *weights, sizes, reverse, keep, resets
    )[:3]


def gru_layer(keep: int) -> Layer:
    """A GRU with this `keep`."""
    return lambda given, weights, sizes, reverse, resets: torch.ops.encore.gru_forward(
        *given, *weights[:4], sizes, reverse, keep, resets
    )[:2]


def elman_layer(relu: bool) -> Layer:
    """A plain layer, with ReLU or tanh."""
    return lambda given, weights, sizes, reverse, resets: torch.ops.encore.elman_forward(
        *given, *weights[:4], sizes, reverse, relu, resets
    )


def run_layers(
    layer: Layer, x: Tensor, states: Sequence[Tensor], weights: Sequence[Sequence[Tensor | None]],
    batch_sizes: Tensor | None, *, directions: int, dropout: float, in_block: bool = False,
    resets: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """All layers on a time-major or packed input: the output, and the last states like the initial ones.

    States are `[layers * directions, batch, width]`, and there are as many sets of weights. `dropout` is what is
    dropped between layers: 0 outside of training. Packed rows may lie in a block (`packing.py`). `resets`, `[T, B]`, is
    true at the first steps of sequences that lie one behind the other.
    """
    resets_by_direction = [resets, *([_ends(resets)] if directions > 1 else [])]
    last: list[tuple[Tensor, ...]] = []
    while len(last) < len(weights):
        if last and dropout:
            x = dropped_rows(x, batch_sizes, dropout) if in_block else F.dropout(x, dropout, True)
        outputs = []
        for direction in range(directions):
            number = len(last)
            given = [x, *(state[number] for state in states)]
            output, *ended = layer(
                given, weights[number], batch_sizes, direction == 1, resets_by_direction[direction]
            )  # fmt: skip
            outputs.append(output)
            last.append(tuple(ended))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return x, tuple(kind[0].unsqueeze(0) if len(kind) == 1 else torch.stack(kind) for kind in zip(*last, strict=True))


def _ends(resets: Tensor | None) -> Tensor | None:
    """The resets of a walk backwards: true at the last steps of sequences that others follow. The very last step is not
    one of them: it finds the initial state."""
    if resets is None:
        return None
    return torch.cat((resets[1:], torch.zeros_like(resets[:1])))
