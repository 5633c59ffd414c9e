"""The loop that a scan runs: the step, what goes into it, and what comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.bptt.source import Source
from encore.bptt.trees import Structure
from encore.errors import OptionError


@dataclass(frozen=True, slots=True)
class Loop:
    """`carry, y = call(carry, x)` for every x."""

    call: Callable[[Any, Any], tuple[Any, Any]]
    carry: Structure
    start: Sequence[Tensor]
    """The first carry."""
    source: Source
    consts: Sequence[Tensor]
    """Leaves that represent the tensors of `consts=`."""
    truncate: int | None
    contexts: Callable[[], contextlib.AbstractContextManager[object]]
    """Autocast as it was around the scan."""

    def is_cut(self, step: int) -> bool:
        """Return whether gradients stop at state `step`."""
        return self.truncate is not None and step > 0 and step % self.truncate == 0


def detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors without their history; a tensor that occurs twice stays one."""
    made = {id(tensor): tensor.detach() for tensor in tensors}
    return [made[id(tensor)] for tensor in tensors]


def leaf(tensor: Tensor) -> Tensor:
    """A new leaf, which requires a gradient if it can have one."""
    made = tensor.detach()
    return made.requires_grad_() if made.is_floating_point() or made.is_complex() else made


class Results:
    """The ys, written into their final place if their number is known."""

    def __init__(self, structure: Structure, examples: Sequence[Tensor], length: int | None) -> None:
        self._structure = structure
        self._kinds = [(one.shape, one.dtype) for one in examples]
        self._parts: list[list[Tensor]] = [[] for _ in examples]
        self._whole: list[Tensor] | None = None
        if length is not None:
            self._whole = [one.new_empty((length, *one.shape)) for one in examples]

    def put(self, step: int, y: Any) -> list[Tensor]:
        """The tensors of this step's y, which are noted."""
        tensors = self._structure.flatten(y)
        for (shape, dtype), tensor in zip(self._kinds, tensors, strict=True):
            if tensor.shape != shape:
                raise OptionError(f"the step's y changes its shape from {tuple(shape)} to {tuple(tensor.shape)}")
            if tensor.dtype != dtype:
                raise OptionError(f"the step's y changes its type from {dtype} to {tensor.dtype}")
        if self._whole is None:
            for parts, tensor in zip(self._parts, tensors, strict=True):
                parts.append(tensor.detach())
        else:
            for whole, tensor in zip(self._whole, tensors, strict=True):
                whole[step] = tensor.detach()
        return tensors

    def all(self) -> list[Tensor]:
        if self._whole is None:
            self._whole = [torch.stack(parts) for parts in self._parts]
            self._parts.clear()
        return self._whole
