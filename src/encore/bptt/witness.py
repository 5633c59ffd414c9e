"""Checksums of every step's y, by which a step that gives another one when it is run again is detected.

The carry is compared bit for bit where a block ends, but a step whose y alone depends on something that changes ends in
the same states. So forward keeps a checksum of every y, and a step that runs again for its tape is compared with it:
four bytes a step and CRC-32 on a CPU; elsewhere eight, and a sum on the device, so that the CPU does not wait for it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from encore.bptt.snapshot import as_bytes


class Witness:
    """Checksums of the ys of the steps from 0 on, in order."""

    def __init__(self) -> None:
        self._sums = array("I")
        self._far = torch.empty(0, dtype=torch.int64)
        self._count = 0

    def note(self, y: Sequence[Tensor]) -> None:
        """The next step's y."""
        near, far = _apart(y)
        if near:
            self._sums.append(_checksum(near))
        if far:
            if self._count >= len(self._far):
                grown = far[0].new_zeros(max(1024, 2 * len(self._far)), dtype=torch.int64)
                grown[: len(self._far)] = self._far
                self._far = grown
            self._far[self._count] = _far_checksum(far)
        self._count += 1

    def agrees(self, start: int, ys: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether these are the ys of the steps from `start` on."""
        if start + len(ys) > self._count:  # those of the last block, which was never run without its tape
            ys = ys[: max(0, self._count - start)]
        apart = [_apart(y) for y in ys]
        for step, (near, _) in enumerate(apart, start):
            if near and _checksum(near) != self._sums[step]:
                return False
        away = [_far_checksum(far) for _, far in apart if far]
        return not away or torch.equal(torch.stack(away), self._far[start : start + len(away)])


def _apart(y: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    near = [tensor for tensor in y if tensor.device.type == "cpu"]
    return near, [tensor for tensor in y if tensor.device.type != "cpu"]


def _checksum(tensors: Sequence[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        total = zlib.crc32(as_bytes(tensor).numpy().data, total)
    return total


def _far_checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Of bytes and of bytes times their place, all on the device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        flat = as_bytes(tensor).to(torch.int64)
        places = torch.arange(1, len(flat) + 1, device=flat.device)
        total = total * 1_000_003 + (flat * places).sum()
    return total
