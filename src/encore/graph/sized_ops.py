"""Backward formulas of pooling layers that take the size of the layer's input instead of the input.

PyTorch's formulas take the input for its shape and layout alone, which keeps the largest activation of the layer alive.
Each of these runs the same kernel and passes, in place of the input, the gradient that the kernel fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
_library = torch.library.Library("encore", "FRAGMENT")

SIZED: dict[Any, Any] = {}
"""PyTorch's formula, whose second argument is the layer's input -> ours, with its size and strides in that place."""
SIZE, STRIDE = 1, 2
"""The positions of these arguments."""


def _define(original: Any, filling: Any, name: str) -> None:
    schema = str(original._schema)
    arguments = schema[schema.index("(") : schema.rindex("->")]
    assert ", Tensor self," in arguments
    _library.define(f"{name}{arguments.replace(', Tensor self,', ', int[] size, int[] strides,')} -> Tensor")

    def backward(gradient: torch.Tensor, size: Sequence[int], strides: Sequence[int], *settings: Any) -> torch.Tensor:
        made = torch.empty_strided(size, strides, dtype=gradient.dtype, device=gradient.device)
        filled: torch.Tensor = filling(gradient, made, *settings, grad_input=made)
        return filled

    def fake(gradient: torch.Tensor, size: Sequence[int], strides: Sequence[int], *settings: Any) -> torch.Tensor:
        return torch.empty_strided(size, strides, dtype=gradient.dtype, device=gradient.device)

    _library.impl(name, backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"encore::{name}", fake, lib=_library)
    SIZED[original] = getattr(torch.ops.encore, name).default


for _packet, _name in (
    (aten.max_pool2d_with_indices_backward, "max_pool2d_backward"),
    (aten.max_pool3d_with_indices_backward, "max_pool3d_backward"),
    (aten.adaptive_max_pool2d_backward, "adaptive_max_pool2d_backward"),
    (aten.adaptive_max_pool3d_backward, "adaptive_max_pool3d_backward"),
    (aten.avg_pool2d_backward, "avg_pool2d_backward"),
    (aten.avg_pool3d_backward, "avg_pool3d_backward"),
):
    _define(_packet.default, _packet.grad_input, _name)
