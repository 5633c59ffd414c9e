"""Recurrent layers as whole-sequence operators that save little for backward, and attention operators.

What lives here: the operators `encore::lstm_forward`, `gru_forward`, `elman_forward`, `additive_scores`,
`dot_attention` and their backwards, their chunks, workspaces and layouts, their steps in C++, Triton and PyTorch, and
the modules of `encore.nn`. What may not: anything that knows of graphs or plans; `WORKSPACES` has the bytes of a call's
workspace for the planner. Private interfaces of PyTorch are in `torch_private.py`.
"""

from encore.rnn import cudnn, dot, elman, gru, lstm, packed_aten, packing, scores
from encore.rnn.registry import WORKSPACES

__all__ = ["WORKSPACES", "cudnn", "dot", "elman", "gru", "lstm", "packed_aten", "packing", "scores"]
