"""Fake tensors: shapes and strides without memory."""

from __future__ import annotations

from typing import Any

import torch

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


def fake_mode() -> FakeTensorMode:
    """A mode for tensors with shapes and no memory, which converts real ones that functions close over."""
    return FakeTensorMode(allow_non_fake_inputs=True)
