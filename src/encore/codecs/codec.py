"""What a planner needs to know about an encoding."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

DENSITY_STEPS = 10_000


class Share(enum.Enum):
    """What of the data decides how long a code is, as a share of the most that there can be: its density."""

    NON_ZEROS = "non-zeros"
    """Of the elements, those that are not zero."""
    NUMBER_BYTES = "bytes of integers"
    """Of the bytes of each number, those that its range takes."""


Densities = Mapping[Share, Mapping[str, float]]
"""By what they are a share of, and by the names of feature maps: the densities that these are planned to have."""


class Bytes(Protocol):
    def __call__(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, density: float | None = None
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to hold a feature map in fewer bytes between its two uses."""

    name: str
    what: str
    """What it does, as a report says it."""
    lossless: bool
    """Decoding gives the very bits back. Else `error` bounds how far off it is, and the user must have agreed."""
    encode: torch._ops.OpOverload
    """`(x, *options) -> code`, one contiguous run of bytes."""
    decode: torch._ops.OpOverload
    """`(code, size, stride, dtype, *options) -> x`, a fresh tensor."""
    accepts: Callable[[Sequence[int], torch.dtype], bool]
    """Can it hold tensors of this shape and type, and in fewer bytes?"""
    nbytes: Bytes
    """What `encode` allocates: exactly, or at most where `exact_size` is false (the density, if known, makes the bound
    an expectation)."""
    exact_size: bool = True
    """The size of a code follows from shape, stride and type; else from the data, too."""
    share: Share = Share.NON_ZEROS
    """What a density is, where it depends on the data."""
    error: Callable[[Tensor], Tensor] | None = None
    """Of a tensor: for every finite element, how far the decoded one may be off."""
    options: tuple[Any, ...] = ()
    """What both operators take at their end."""

    @property
    def exactness(self) -> str:
        return "lossless" if self.lossless else "bounded error"

    def density(self, size: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> float:
        """The largest density at which a code takes no more than so many bytes, to a ten-thousandth."""
        least, most = 0, DENSITY_STEPS
        while least < most:
            middle = -(-(least + most) // 2)
            fits = self.nbytes(shape, stride, dtype, middle / DENSITY_STEPS) <= size
            least, most = (middle, most) if fits else (least, middle - 1)
        return least / DENSITY_STEPS

    def encode_args(self, x: Any) -> tuple[Any, ...]:
        """The arguments of `encode`; `x` may be a tensor, or whatever stands for one in a graph."""
        return (x, *self.options)

    def decode_args(self, code: Any, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[Any, ...]:
        """The arguments of `decode`, with the size and stride of the tensor that was encoded."""
        return (code, list(size), list(stride), dtype, *self.options)
