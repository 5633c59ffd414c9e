"""The workspace of an operator: one block, laid out by a table, so that its bytes are known beforehand."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import overload

import torch
from torch import Tensor

ALIGNMENT = 64

Buffers = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each buffer, by name."""


def buffer_bytes(buffers: Buffers) -> int:
    """The size of the block."""
    return sum(_padded(shape, dtype) for shape, dtype in buffers.values())


class Arena:
    """Buffers in one allocation."""

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        self._tensors: dict[str, Tensor] = {}
        block = torch.empty(buffer_bytes(buffers), dtype=torch.uint8, device=device)
        blocks: dict[torch.dtype, Tensor] = {}  # the same bytes, read as each type
        offset = 0
        for name, (shape, dtype) in buffers.items():
            typed = blocks.get(dtype)
            if typed is None:
                typed = blocks[dtype] = block.view(dtype)
            self._tensors[name] = typed.as_strided(shape, _strides(shape), offset // dtype.itemsize)
            offset += _padded(shape, dtype)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @overload
    def get(self, name: str) -> Tensor | None: ...
    @overload
    def get(self, name: str, other: Tensor) -> Tensor: ...
    def get(self, name: str, other: Tensor | None = None) -> Tensor | None:
        """The buffer, or the other tensor if there is none of that name."""
        return self._tensors.get(name, other)


@functools.lru_cache(maxsize=256)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
