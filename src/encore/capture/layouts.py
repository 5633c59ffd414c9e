"""How a tensor is laid out: all that an operator's choice of kernel may depend on."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TensorLayout(NamedTuple):
    """Shape, strides, type and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def zeros(self) -> torch.Tensor:
        return self.empty().zero_()
