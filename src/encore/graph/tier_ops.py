"""Operators that offload a value to a tier and reload it.

A store returns a token, by which a load finds the stored bytes. Neither is an operator of PyTorch's: lowering binds
them to tiers (`lower/transport.py`). Called as plain operators they wait until the bytes have moved; a schedule may
begin them early and wait late (`schedule/transfers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TOKEN_DTYPE = torch.int64
TOKEN_BYTES = TOKEN_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class StoreTo:
    """Offload a tensor to a tier: `token = store(x)`."""

    tier: str

    def __str__(self) -> str:
        return f"store to {self.tier}"


@dataclass(frozen=True, slots=True)
class LoadFrom:
    """Reload a tensor: `x = load(token, size, stride, dtype)`."""

    tier: str

    def __str__(self) -> str:
        return f"load from {self.tier}"


def is_transfer(target: Any) -> bool:
    """Return whether an operator moves bytes to or from a tier."""
    return isinstance(target, StoreTo | LoadFrom)
