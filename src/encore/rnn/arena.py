"""Memory that an operator takes aside: one block, laid out by a table, so that its bytes can be told beforehand."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import overload

import torch
from torch import Tensor

ALIGNMENT = 64

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each buffer, by name. Names with a number behind a dot are those of a set: see `in_turns`."""


def layout_bytes(layout: Layout) -> int:
    """The size of the block."""
    return sum(_padded(shape, dtype) for shape, dtype in layout.values())


def in_turns(layout: Layout, turns: int) -> Layout:
    """So many sets of these buffers, which chunks use in turns."""
    return {f"{name}.{turn}": buffer for turn in range(turns) for name, buffer in layout.items()}


class Arena:
    """The buffers of a layout, in one allocation."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._suffix = ""
        block = torch.empty(layout_bytes(layout), dtype=torch.uint8, device=device)
        blocks: dict[torch.dtype, Tensor] = {}  # the same bytes, read as each type
        offset = 0
        for name, (shape, dtype) in layout.items():
            typed = blocks.get(dtype)
            if typed is None:
                typed = blocks[dtype] = block.view(dtype)
            self._buffers[name] = typed.as_strided(shape, _strides(shape), offset // dtype.itemsize)
            offset += _padded(shape, dtype)

    def of(self, turn: int) -> Arena:
        """The same buffers, those of this set under their plain names."""
        view = Arena.__new__(Arena)
        view._buffers, view._suffix = self._buffers, f".{turn}"
        return view

    def __getitem__(self, name: str) -> Tensor:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    @overload
    def get(self, name: str) -> Tensor | None: ...
    @overload
    def get(self, name: str, other: Tensor) -> Tensor: ...
    def get(self, name: str, other: Tensor | None = None) -> Tensor | None:
        """The buffer, or the other tensor if the layout has none of that name."""
        found = self._buffers.get(name + self._suffix)
        return self._buffers.get(name, other) if found is None else found


@functools.lru_cache(maxsize=256)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
