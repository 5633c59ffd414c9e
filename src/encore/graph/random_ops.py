"""Eager's in-place draws as operators.

On CPU, eager dropout draws into an empty tensor shaped *and strided* like its input. A functional graph would draw into
a contiguous one instead: for a transposed input that is another mask. `encore::dropout_noise` is the draw as one
operator, so that the same seed gives the same mask, and a planner sees one random value instead of three;
`encore::dropout_mask` is the same draw in one byte an element, without the constant that it is multiplied by;
`encore::bernoulli_noise` stands for any other `empty.bernoulli_(p)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from encore.kernels.draws import flip_coins_

_library = torch.library.Library("encore", "FRAGMENT")
_library.define("dropout_noise(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def dropout_noise(like: torch.Tensor, p: float) -> torch.Tensor:
    """0 with probability `p`, else 1 / (1 - p): the factors of CPU dropout."""
    return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)


def _fake_dropout_noise(like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like)


_library.impl("dropout_noise", dropout_noise, "CompositeExplicitAutograd")
torch.library.register_fake("encore::dropout_noise", _fake_dropout_noise, lib=_library)


_library.define("dropout_mask(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def dropout_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """False with probability `p`: where `dropout_noise` would be 0."""
    return flip_coins_(torch.empty_like(like, dtype=torch.bool), 1 - p)


def _fake_dropout_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like, dtype=torch.bool)


_library.impl("dropout_mask", dropout_mask, "CompositeExplicitAutograd")
torch.library.register_fake("encore::dropout_mask", _fake_dropout_mask, lib=_library)


_library.define(
    "bernoulli_noise(Tensor like, float p, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def bernoulli_noise(like: torch.Tensor, p: float, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """`empty_like(like).bernoulli_(p)`, drawn in the order of that memory; contiguous, as the functional graph says."""
    return torch.empty_like(like).bernoulli_(p, generator=generator).contiguous()


_library.impl("bernoulli_noise", bernoulli_noise, "CompositeExplicitAutograd")


def traced_dropout(source: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`aten::dropout` while tracing: what its C++ kernel does, with the draw as one operator."""
    if not train or p == 0 or source.numel() == 0:
        return source
    if p == 1:
        return source * torch.zeros((), dtype=source.dtype, device=source.device)
    if source.device.type == "cpu":
        return source * torch.ops.encore.dropout_noise(source.detach(), p)
    return torch.native_dropout(source, p, train)[0]


def traced_dropout_(source: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`aten::dropout_` while tracing."""
    return source.copy_(traced_dropout(source, p, train)) if train and p != 0 else source


@dataclass(frozen=True)
class DrawState:
    """An operator that returns the state of a generator (by default, of the device's own), to repeat a draw."""

    device: str
    generator: Any = None


@dataclass(frozen=True)
class DrawAgain:
    """An operator that repeats a random operator from a state, its first operand. The generator's state is restored."""

    target: Any
    device: str
