"""What an encoding is: a pair of operators, and what a planner needs to know about them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from encore.codecs.layout import Restored, layout_of
from encore.codecs.operators import define, define_encoder, fake_decoded, taken_to_decode
from encore.codecs.torch_private import OpOverload

DENSITY_STEPS = 10_000


class Share(enum.Enum):
    """What in the data decides how long a code is, as a share of its maximum: its density."""

    NON_ZEROS = "non-zeros"
    """Of the elements, those that are not zero."""
    NUMBER_BYTES = "bytes of integers"
    """Of the bytes of each number, those that its range takes."""


Densities = Mapping[Share, Mapping[str, float]]
"""The densities that activations are planned to have: by kind of share, and by the names of the activations."""


@dataclass(frozen=True, slots=True)
class Coding:
    """The operators `encore::encode_<name>(x, options) -> code` and `encore::decode_<name>(code, size, stride, dtype,
    options) -> x`, known to fake tensors. The functions below get the options at their end."""

    name: str
    write: Callable[..., Tensor]
    """`(flat, ...) -> code`: encode a run of elements. A code is one contiguous run of bytes."""
    read: Callable[..., None]
    """`(code, flat, ...)`: decode into a run of elements; raises `OptionError` if the code does not fit."""
    size: Callable[..., int]
    """`(count, dtype, ...)`: the bytes of a code for so many elements; the most, if they depend on the data."""
    workspace: Callable[..., int]
    """`(count, dtype, device, ...)`: bytes that `write` and `read` allocate and free, without the code."""
    options: str = ""
    """Of the operators, as their schemas declare them."""
    exact: Callable[..., bool] = lambda *_: True
    """`(...)`: whether `size` is exact."""
    encode: OpOverload = field(init=False)
    decode: OpOverload = field(init=False)

    def __post_init__(self) -> None:
        options = f", {self.options}" if self.options else ""
        schema = f"encode_{self.name}(Tensor x{options}) -> Tensor"
        encode = define_encoder(schema, self.write, self.size, self.workspace, self.exact)
        schema = f"decode_{self.name}(Tensor code, SymInt[] size, SymInt[] stride, ScalarType dtype{options}) -> Tensor"
        decode = define(schema, self._decoded, fake_decoded, taken_to_decode(self.workspace))
        object.__setattr__(self, "encode", encode)
        object.__setattr__(self, "decode", decode)

    def _decoded(
        self, code: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *options: Any
    ) -> Tensor:
        restored = Restored(size, stride, dtype, code.device)
        self.read(code, restored.flat, *options)
        return restored.finish()


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to keep an activation in fewer bytes between its two uses."""

    name: str
    what: str
    """What it does, for a report."""
    coding: Coding
    dtypes: tuple[torch.dtype, ...]
    """What it encodes in fewer bytes."""
    options: tuple[Any, ...] = ()
    """Of both operators."""
    error: Callable[[Tensor], Tensor] | None = None
    """Of a lossy codec: for every finite element of a tensor, how far the decoded one may be off."""
    expected: Callable[[int, torch.dtype, float], int] | None = None
    """`(count, dtype, density)`: the expected bytes of a code, if they depend on the data."""
    share: Share = Share.NON_ZEROS
    """What a density is, if bytes depend on the data."""
    max_index: int | None = None
    """The largest number that it encodes, from 0 on, if it takes nothing but indices of a known range."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives the same bits. Else `error` is the bound, and the user must have agreed."""
        return self.error is None

    @property
    def exactness(self) -> str:
        return "lossless" if self.lossless else "bounded error"

    @property
    def exact_size(self) -> bool:
        """Whether the size of a code follows from shape, stride and type alone."""
        return self.expected is None

    @property
    def encode(self) -> OpOverload:
        return self.coding.encode

    @property
    def decode(self) -> OpOverload:
        return self.coding.decode

    def accepts(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether it encodes tensors of this shape and type in fewer bytes."""
        return dtype in self.dtypes

    def nbytes(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, density: float | None = None
    ) -> int:
        """What `encode` allocates: exactly, or at most if `exact_size` is false; the expectation at a given density."""
        count = layout_of(shape, stride).count
        if self.expected is None or density is None:
            return self.coding.size(count, dtype, *self.options)
        return self.expected(count, dtype, density)

    def density(self, size: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> float:
        """The largest density at which a code takes at most `size` bytes, to a ten-thousandth."""
        least, most = 0, DENSITY_STEPS
        while least < most:
            middle = -(-(least + most) // 2)
            fits = self.nbytes(shape, stride, dtype, middle / DENSITY_STEPS) <= size
            least, most = (middle, most) if fits else (least, middle - 1)
        return least / DENSITY_STEPS

    def encode_args(self, x: Any) -> tuple[Any, ...]:
        """The arguments of `encode`; `x` may be a tensor, or what represents one in a graph."""
        return (x, *self.options)

    def decode_args(self, code: Any, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[Any, ...]:
        """The arguments of `decode`, with the size and stride of the tensor that was encoded."""
        return (code, list(size), list(stride), dtype, *self.options)
