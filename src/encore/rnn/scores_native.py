"""Additive attention's scores and their gradients in C++: `kernels/scores.cpp`, called through ctypes on addresses.

The structure below has the fields of the C++ file's in order.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from encore.kernels import library
from encore.rnn.native import INT, POINTER, SUFFIX
from encore.rnn.score_kernels import ScoreGradients, ScoreOperands

WORK_PER_THREAD = 1 << 15
"""Numbers of the middle that are worth a thread."""


class Tensor3(ctypes.Structure):
    _fields_ = [("data", POINTER), ("strides", INT * 3)]


class Vector(ctypes.Structure):
    _fields_ = [("data", POINTER), ("stride", INT)]


class Scores(ctypes.Structure):
    _fields_ = [
        *((size, INT) for size in ("batch", "queries", "keys", "hidden", "threads", "normalised")),
        ("eps", ctypes.c_double), ("workspace", POINTER), ("query", Tensor3), ("key", Tensor3),
        *((vector, Vector) for vector in ("weight", "bias", "norm_weight", "norm_bias")),
        ("scores", POINTER), ("grad", Tensor3),
        *((f"grad_{result}", POINTER) for result in ("keys", "query", "weight", "bias", "norm_weight", "norm_bias")),
        ("add_keys", INT),
    ]  # fmt: skip


@functools.cache
def scores_library() -> ctypes.CDLL:
    """The compiled functions; raises `BuildError` if they are not available."""
    return library("scores")


def forward_bytes(operands: ScoreOperands) -> int:
    """A few rows a thread, and a sequence's queries."""
    return _workspace_bytes(operands, backward=False)


def backward_bytes(operands: ScoreOperands) -> int:
    """In addition, gradients of a sequence's queries."""
    return _workspace_bytes(operands, backward=True)


def forward(operands: ScoreOperands, scores: Tensor) -> None:
    workspace = torch.empty(forward_bytes(operands), dtype=torch.uint8)
    call = _call(operands, workspace)
    call.scores = scores.data_ptr()
    _function("scores_forward", scores.dtype)(ctypes.byref(call))


def backward(operands: ScoreOperands, grad: Tensor, results: ScoreGradients, add_keys: bool) -> None:
    workspace = torch.empty(backward_bytes(operands), dtype=torch.uint8)
    call = _call(operands, workspace)
    call.grad = _tensor(grad)
    for name, result in zip(("keys", "query", "weight", "bias", "norm_weight", "norm_bias"), results, strict=True):
        setattr(call, f"grad_{name}", result.data_ptr() if result.numel() else None)
    call.add_keys = add_keys
    _function("scores_backward", grad.dtype)(ctypes.byref(call))


def _call(operands: ScoreOperands, workspace: Tensor) -> Scores:
    vectors = (operands.weight, operands.bias, operands.norm_weight, operands.norm_bias)
    return Scores(
        *operands.shape, operands.hidden, _threads(operands), operands.eps is not None, operands.eps or 0.0,
        workspace.data_ptr(), _tensor(operands.query), _tensor(operands.keys), *map(_vector, vectors),
    )  # fmt: skip


def _threads(operands: ScoreOperands) -> int:
    batch, _, keys = operands.shape
    return max(1, min(torch.get_num_threads(), operands.middle // WORK_PER_THREAD, batch * keys))


def _workspace_bytes(operands: ScoreOperands, *, backward: bool) -> int:
    ask: Any = getattr(scores_library(), f"workspace_bytes_{SUFFIX[operands.query.dtype]}")
    ask.restype = INT
    return ask(INT(operands.hidden), INT(operands.shape[1]), INT(_threads(operands)), INT(backward))


def _tensor(tensor: Tensor) -> Tensor3:
    return Tensor3(tensor.data_ptr(), (INT * 3)(*tensor.stride()))


def _vector(tensor: Tensor | None) -> Vector:
    return Vector(None, 0) if tensor is None else Vector(tensor.data_ptr(), tensor.stride(0))


@functools.cache
def _function(name: str, dtype: torch.dtype) -> Any:
    function = getattr(scores_library(), f"{name}_{SUFFIX[dtype]}")
    function.restype = None
    return function
