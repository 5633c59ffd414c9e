"""The private API of PyTorch that devices use: the functions behind `torch.nn`'s dropout and recurrent modules, and how
cuBLAS's workspaces are freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import _VF
from torch.nn import functional as F

RECURRENT = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Gates of each kind of recurrent layer."""


def dropout_functions() -> frozenset[Any]:
    """The functions by which dropout is called."""
    return frozenset({F.dropout, torch.dropout, _VF.dropout})


def recurrent_functions() -> dict[Any, str]:
    """The kind of layer, by the functions that it is called by."""
    return {getattr(place, kind): kind for kind in RECURRENT for place in (torch, _VF)}


def free_product_workspaces() -> None:
    """Free the workspaces that PyTorch keeps for cuBLAS; the next product of a thread allocates its own again."""
    torch._C._cuda_clearCublasWorkspaces()
