"""The private API of PyTorch that graphs, and the rooms built on them, use.

Operators of graphs are `OpOverload`s, arguments are flattened by `pytree`, shapes are computed on fake tensors, and a
`TorchDispatchMode` sees every operator that runs.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "OpOverload", "TorchDispatchMode", "packet_name", "pytree"]


def packet_name(target: Any) -> str:
    """The name of an operator without its overload; empty for a target that is no operator of PyTorch's dispatcher."""
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else ""
