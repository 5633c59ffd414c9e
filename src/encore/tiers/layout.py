"""Tensors as one block of bytes, and back: the same shapes, strides and bits.

Values are packed densely, each at a multiple of 64 bytes. Unpacking gives every tensor the strides it had, gaps
included, and its place relative to a cache line: kernels choose their vector code by both, and the last bit of their
results depends on it.

Aliases. A tensor that occurs twice in a block (same storage, offset, shape, strides, type) is packed once and comes
back as one tensor. All of them are alive while they are compared, so that an address cannot stand for two things.
Overlapping but different views are packed one by one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encore.devices import KINDS, kind_of
from encore.errors import TierError

LINE = 64
PAGE = 4096


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a block."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lead: int
    """Elements between a cache line's beginning and the tensor's first."""
    position: int
    """Of its bytes in the block."""
    bytes: int

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The distinct elements: expanded ones are packed once."""
        return tuple(1 if stride == 0 else size for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def order(self) -> list[int]:
        """The dimensions, from the one with the largest steps in memory."""
        return sorted(range(len(self.strides)), key=self.strides.__getitem__, reverse=True)

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_plain(self) -> bool:
        """Whether it lies in host memory, packed as it is."""
        return self.device.type == "cpu" and self.strides == _contiguous_strides(self.shape)

    def pack(self, tensor: Tensor, block: Tensor, *, wait: bool = True) -> None:
        if self.is_plain:  # copy_ would start PyTorch's threads next to those that compute
            ctypes.memmove(block.data_ptr() + self.position, tensor.data_ptr(), self.bytes)
            return
        tensor = tensor.detach()
        distinct = tensor.as_strided(self.packed_shape, self.strides) if 0 in self.strides else tensor
        self._packed(block).copy_(distinct.permute(self.order), non_blocking=not wait)

    def make(self) -> Tensor:
        memory = torch.empty(self.lead + self.span, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.strides, self.lead)

    def fill(self, made: Tensor, block: Tensor, *, wait: bool = True) -> None:
        if self.is_plain:
            ctypes.memmove(made.data_ptr(), block.data_ptr() + self.position, self.bytes)
            return
        distinct = made.as_strided(self.packed_shape, self.strides)
        distinct.permute(self.order).copy_(self._packed(block), non_blocking=not wait)

    def _packed(self, block: Tensor) -> Tensor:
        """Its part of a block, with the dimensions in the order in which they lie in memory: a dense tensor of a GPU is
        copied as it lies, and not through another one."""
        part = block[self.position : self.position + self.bytes].view(self.dtype)
        return part.view([self.packed_shape[dim] for dim in self.order])


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where each of a list of tensors lies in the block."""

    entries: tuple[Entry, ...]
    places: tuple[int, ...]
    """By tensor: its entry. A tensor that occurs twice has one."""
    bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether it is one tensor, packed as it lies in memory: it can be packed in pieces."""
        return len(self.entries) == 1 and self.entries[0].is_plain

    def pack(
        self, tensors: Sequence[Tensor], block: Tensor, first: int = 0, size: int | None = None, *, wait: bool = True
    ) -> None:
        """Write the tensors into a block of bytes or, if they are plain, `size` bytes of them from `first` on."""
        if self.is_plain:
            ctypes.memmove(block.data_ptr(), tensors[0].data_ptr() + first, self._piece(first, size))
            return
        for entry, tensor in self._each(tensors):
            entry.pack(tensor, block, wait=wait)

    def fill(
        self, tensors: Sequence[Tensor], block: Tensor, first: int = 0, size: int | None = None, *, wait: bool = True
    ) -> None:
        """Write the bytes of a block into the tensors that `make` made or, if they are plain, into `size` bytes of them
        from `first` on."""
        if self.is_plain:
            ctypes.memmove(tensors[0].data_ptr() + first, block.data_ptr(), self._piece(first, size))
            return
        for entry, tensor in self._each(tensors):
            entry.fill(tensor, block, wait=wait)

    def make(self) -> list[Tensor]:
        """New tensors, to be filled."""
        made = [entry.make() for entry in self.entries]
        return [made[place] for place in self.places]

    def unpack(self, block: Tensor) -> list[Tensor]:
        """New tensors with the bytes of a block."""
        made = self.make()
        self.fill(made, block)
        return made

    def _each(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Entry, Tensor]]:
        """Every entry with its first tensor; entries are numbered in the order of those."""
        first = dict(zip(reversed(self.places), reversed(tensors), strict=True))
        return ((entry, first[place]) for place, entry in enumerate(self.entries))

    def _piece(self, first: int, size: int | None) -> int:
        """Bytes of a piece of the only tensor."""
        left = max(0, self.entries[0].bytes - first)
        return left if size is None else min(size, left)


def layout_of(tensors: Sequence[Tensor]) -> BlockLayout:
    """Return how these tensors are packed; raises `TierError` for those that have no plain memory of their own."""
    entries: list[Entry] = []
    places: list[int] = []
    known: dict[int, int] = {}
    position = 0
    for tensor in tensors:
        if kind_of(tensor.device) not in KINDS:
            raise TierError(
                f"a tier takes tensors of CPUs and CUDA devices, not of {tensor.device}, whose order of copies is not "
                "known to it; leave out tiers=, or store a copy on the CPU"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise TierError(
                f"a tier takes plain dense tensors, not one with layout {tensor.layout}"
                f"{' and a lazy conjugate or sign' if tensor.layout == torch.strided else ''}; "
                "turn it into one first (to_dense, resolve_conj, resolve_neg)"
            )
        if id(tensor) in known:  # two tensors with one memory stay two: one of them may be detached
            places.append(known[id(tensor)])
            continue
        shape, strides, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        size = dtype.itemsize
        distinct = math.prod(1 if stride == 0 else extent for extent, stride in zip(shape, strides, strict=True))
        lead = (tensor.data_ptr() % LINE) // size if tensor.numel() else 0
        entry = Entry(dtype, tensor.device, shape, strides, lead, position, distinct * size)
        known[id(tensor)] = len(entries)
        places.append(len(entries))
        entries.append(entry)
        position = rounded(position + entry.bytes, LINE)
    return BlockLayout(tuple(entries), tuple(places), position)
