"""Operators that move a value to a tier and bring it back.

A store makes a token, the one name by which its parcel can be asked for; a load makes the value again from the token.
Neither is PyTorch's: whoever runs a step knows the tiers (`lower/transport.py`). Called as plain operators they wait
until the bytes have moved; a schedule may begin them early and wait late (`schedule/transfers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TOKEN_DTYPE = torch.int64
TOKEN_BYTES = TOKEN_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class StoreTo:
    """Put a tensor into a tier: `token = store(x)`."""

    tier: str

    def __str__(self) -> str:
        return f"store to {self.tier}"


@dataclass(frozen=True, slots=True)
class LoadFrom:
    """Bring a tensor back: `x = load(token, size, stride, dtype)`."""

    tier: str

    def __str__(self) -> str:
        return f"load from {self.tier}"


def is_transfer(target: Any) -> bool:
    """Does it move bytes rather than compute?"""
    return isinstance(target, StoreTo | LoadFrom)
