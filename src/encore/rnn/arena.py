"""Memory that an operator takes aside: one block, laid out by a table, so that its bytes can be told beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 64

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each buffer, by name."""


def layout_bytes(layout: Layout) -> int:
    """The size of the block."""
    return sum(_padded(shape, dtype) for shape, dtype in layout.values())


class Arena:
    """The buffers of a layout, in one allocation."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._block = torch.empty(layout_bytes(layout), dtype=torch.uint8, device=device)
        self._buffers: dict[str, Tensor] = {}
        offset = 0
        for name, (shape, dtype) in layout.items():
            end = offset + math.prod(shape) * dtype.itemsize
            self._buffers[name] = self._block[offset:end].view(dtype).view(shape)
            offset += _padded(shape, dtype)

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers[name]

    def get(self, name: str) -> Tensor | None:
        """The buffer, or nothing if the layout has none of that name."""
        return self._buffers.get(name)


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
