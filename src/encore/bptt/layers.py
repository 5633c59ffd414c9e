"""Recurrent layers over sequences that do not fit: pieces of time, one step of a scan each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from encore.bptt.scanning import scan
from encore.bptt.source import Pieces
from encore.errors import OptionError

CHUNK = 32
"""Steps of time in a piece by default."""


def over_time(
    layer: nn.RNNBase, x: Tensor, state: Any = None, *, chunk: int = CHUNK, **options: Any
) -> tuple[Tensor, Any]:
    """`layer(x, state)` for an LSTM, GRU or RNN of `torch.nn` or `encore.nn`, in the memory that `options` give.

    The sequence goes through the layer `chunk` steps at a time, which is what a step of the scan is; `options` are
    those of `encore.scan` (`budget=`, `slots=`, `tiers=`, ...). `truncate=` counts steps of time, and is a multiple of
    `chunk`. The numbers are those of the same pieces one after another, bit for bit, and those of one call up to
    rounding, since matrix products have other shapes.
    """
    if not isinstance(layer, nn.RNNBase):
        raise OptionError(f"over_time takes an LSTM, GRU or RNN, not a {type(layer).__name__}; write a step for scan")
    if layer.bidirectional:
        raise OptionError("a bidirectional layer runs from both ends, and cannot go piece by piece; use two layers")
    if not isinstance(x, Tensor) or x.dim() != 3 or not len(x.transpose(0, 1) if layer.batch_first else x):
        raise OptionError("over_time takes a batched sequence: a tensor of three dimensions, with at least one step")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise OptionError(f"chunk={chunk!r} is not accepted; give a number of steps, at least 1")
    truncate = options.get("truncate")
    if isinstance(truncate, int) and truncate > 0:
        if truncate % chunk:
            raise OptionError(
                f"truncate={truncate} steps of time do not end with a piece of {chunk}; give a multiple, or chunk="
            )
        options["truncate"] = truncate // chunk
    time_first = x.transpose(0, 1) if layer.batch_first else x
    if state is None:
        state = _zeros(layer, time_first)

    steps = len(time_first)
    chunk = min(chunk, steps)

    def step(state: Any, piece: Tensor) -> tuple[Any, Tensor]:
        output, state = layer(piece.transpose(0, 1) if layer.batch_first else piece, state)
        output = output.transpose(0, 1) if layer.batch_first else output
        missing = chunk - len(output)  # the last piece may be short, and all ys are stacked
        return state, nn.functional.pad(output, (0, 0, 0, 0, 0, missing)) if missing else output

    state, ys = scan(step, state, Pieces(time_first, chunk), **options)
    output = ys.flatten(0, 1)[:steps]
    return output.transpose(0, 1) if layer.batch_first else output, state


def _zeros(layer: nn.RNNBase, x: Tensor) -> Any:
    def zeros(width: int) -> Tensor:
        return x.new_zeros((layer.num_layers, x.shape[1], width))

    h = zeros(layer.proj_size or layer.hidden_size)
    return (h, zeros(layer.hidden_size)) if layer.mode == "LSTM" else h
