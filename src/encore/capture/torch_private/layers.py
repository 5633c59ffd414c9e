"""Layers of PyTorch's own in code that Dynamo does not capture: each call of one becomes a graph.

Dynamo gives up a function whole if a graph would end inside a loop of it. Modules of the user's that this function
calls are captured then, one by one. Modules of PyTorch's own are not: Dynamo skips their code unless it is called from
code that it traces.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch._dynamo.trace_rules as rules
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn.utils.rnn import PackedSequence

LAYERS = (
    nn.Sequential, nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell, nn.MultiheadAttention, nn.Transformer,
    nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
"""Those with activations that a plan can do without. A single operator saves operands, which its caller keeps."""
CODES = frozenset(layer.forward.__code__ for layer in LAYERS)

_wanted: ContextVar[bool] = ContextVar("encore: layers are captured", default=False)
_lock = threading.Lock()
_running = 0
_check = rules.check


def _check_layers(obj: Any, is_inlined_call: bool = False, frame: Any | None = None) -> bool:
    if frame is not None and not is_inlined_call and _wanted.get() and frame.f_code in CODES:
        return any(isinstance(given, PackedSequence) for given in frame.f_locals.values())
    return _check(obj, is_inlined_call, frame)


@contextlib.contextmanager
def captured_layers(*, wanted: bool) -> Iterator[None]:
    """Have Dynamo capture calls of `LAYERS` from code that it does not capture."""
    global _running
    if not wanted:
        yield
        return
    token = _wanted.set(True)
    with _lock:
        _running += 1
        rules.check = _check_layers
        for code in CODES:  # another compiled function may have marked them to be skipped for good
            set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT))
    try:
        yield
    finally:
        _wanted.reset(token)
        with _lock:
            _running -= 1
            if not _running:
                rules.check = _check
