"""Recurrent layers as whole-sequence operators that keep as little as they are told to.

What lives here: the operators `encore::lstm_forward`, `gru_forward`, `elman_forward`, `additive_scores`,
`dot_attention` and their backwards, the chunks, workspaces and layouts they work in, their steps in C++ and in PyTorch,
and the modules of `encore.nn`. What may not: anything that knows of graphs or plans; `WORKSPACES` tells a planner what
a call takes aside.
"""

from encore.rnn import dot, elman, gru, lstm, packed_aten, packing, scores
from encore.rnn.registry import WORKSPACES

__all__ = ["WORKSPACES", "dot", "elman", "gru", "lstm", "packed_aten", "packing", "scores"]
