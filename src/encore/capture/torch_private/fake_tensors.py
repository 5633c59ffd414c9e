"""Fake tensors: shapes and strides without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from encore.graph.torch_private import FakeTensor, FakeTensorMode


def fake_window(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor on a given meta storage. To be called inside `real_tensors`."""
    return FakeTensor(mode, torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride), device)


def is_plain_fake(thing: Any) -> bool:
    """Return whether this is a fake tensor for a dense one that is no tensor subclass."""
    return type(thing) is FakeTensor and thing.layout is torch.strided


class WatchedFakeMode(FakeTensorMode):
    """A mode for tensors with shapes and no memory, which shows the results of every operator that runs on them. Real
    tensors that functions close over are converted."""

    def __init__(self, see: Callable[[Any], None]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._see = see
        self._depth = 0

    def dispatch(self, *args: Any, **kwargs: Any) -> object:
        """Run one operator. What an operator of Python's runs to find its shapes is not shown."""
        self._depth += 1
        try:
            result = super().dispatch(*args, **kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            self._see(result)
        return result


DataDependent = DataDependentOutputException
"""An operator whose result has no shape, or is no tensor, before there is data: `.item()`, for one."""
