"""The order in which a code has the elements of a tensor: that of its memory, so that encoding is one straight pass.

The order follows from size and stride alone, so a code has no shape, and decoding into the size and stride that were
encoded finds every element again. Three kinds of layout:

- **dense** (contiguous, channels last, any permutation of those): the memory from the first element to the last;
- **expanded**: dimensions of stride 0 are stored once, and the rest by the other two rules;
- **with gaps** (every second column of something): elements are gathered, dimensions sorted by falling stride (in the
  order of the dimensions where strides are equal).

Elements that overlap in another way (windows made by `as_strided`) are stored as the memory that they lie in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """How the elements of a tensor are walked."""

    count: int
    """Elements of a code."""
    size: tuple[int, ...]
    """Of the tensor, 1 where it is expanded."""
    stride: tuple[int, ...]
    order: tuple[int, ...] | None
    """None: the memory as it is. Else there are gaps, and this is the order of the dimensions."""

    @property
    def gathered(self) -> bool:
        return self.order is not None


def layout_of(size: Sequence[int], stride: Sequence[int]) -> CodeLayout:
    """The walk through a tensor of this size and stride."""
    return _layout(tuple(map(int, size)), tuple(map(int, stride)))


@functools.lru_cache(maxsize=4096)
def _layout(size: tuple[int, ...], stride: tuple[int, ...]) -> CodeLayout:
    kept = tuple(1 if step == 0 and length > 0 else length for length, step in zip(size, stride, strict=True))
    elements = math.prod(kept)
    if elements == 0:
        return CodeLayout(0, kept, stride, None)
    long = sorted((step, length) for length, step in zip(kept, stride, strict=True) if length > 1)
    reach, apart = 0, True  # offset of the last element so far; no two elements share memory
    for step, length in long:
        apart = apart and step > reach
        reach += (length - 1) * step
    if not apart or reach + 1 == elements:
        return CodeLayout(reach + 1, kept, stride, None)
    return CodeLayout(elements, kept, stride, tuple(sorted(range(len(size)), key=lambda dim: -stride[dim])))


def layout_like(x: Tensor) -> CodeLayout:
    return layout_of(x.shape, x.stride())


def same_walk(size: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two strides mean the same memory. They may differ in dimensions of size 1."""
    return all(one == two or length <= 1 for length, one, two in zip(size, stride, other, strict=True))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Elements fill their memory, each once."""
    layout = layout_of(size, stride)
    return layout.order is None and layout.count == math.prod(size)


def elements_of(x: Tensor) -> Tensor:
    """The elements of a code, as one contiguous run: the tensor's own memory, or a copy if that has gaps."""
    layout = layout_like(x)
    if layout.order is None:
        return x.as_strided((layout.count,), (1,))
    return x.as_strided(layout.size, layout.stride).permute(layout.order).contiguous().view(layout.count)


def gathered_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """The workspace of `elements_of` and of `Restored`."""
    layout = layout_of(size, stride)
    return layout.count * dtype.itemsize if layout.gathered else 0


class Restored:
    """A fresh tensor of a size and stride, filled through `flat`, the run of elements of a code."""

    def __init__(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout_of(size, stride)
        self._result = torch.empty_strided(size, stride, dtype=dtype, device=device)
        count = self._layout.count
        if self._layout.order is None:
            self.flat = self._result.as_strided((count,), (1,))
        else:
            self.flat = torch.empty(count, dtype=dtype, device=device)

    def finish(self) -> Tensor:
        layout = self._layout
        if layout.order is not None:
            target = self._result.as_strided(layout.size, layout.stride).permute(layout.order)
            target.copy_(self.flat.view(target.shape))
        return self._result
