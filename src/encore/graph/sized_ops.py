"""Backward formulas of pooling layers that are told the size of their input instead of being given it.

PyTorch's own take the input of the layer for the sake of its shape and layout, which keeps the largest feature map of
its neighbourhood alive. Each of these is the same kernel: it is given, where it looks for the input, the very tensor
that it is about to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
_library = torch.library.Library("encore", "FRAGMENT")

SIZED: dict[Any, Any] = {}
"""PyTorch's formula, whose second argument is the layer's input -> ours, which takes its size and strides there."""
SIZE, STRIDE = 1, 2
"""Where ours take them."""


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
