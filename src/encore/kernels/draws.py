"""Coin flips of the CPU's generator at the speed of memory: `Tensor.bernoulli_` on booleans, bit for bit."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Callable

import torch

from encore.kernels.build import BuildError, library

log = logging.getLogger("encore")

STATE_BYTES = 5056
"""Size of the CPU generator's state, as `draws.cpp` reads it."""
FEW = 512
"""So few coins are flipped before a state has been fetched and put back."""

Coins = Callable[[int, int, int, int], None]


def flip_coins_(coins: torch.Tensor, p: float) -> torch.Tensor:
    """Fill a dense tensor of booleans, in the order of its memory: true with probability `p`."""
    generator = torch.default_generator
    is_plain = type(coins) is torch.Tensor and coins.device.type == "cpu"  # an estimate's tensors have no memory
    flip = _compiled() if is_plain and coins.numel() >= FEW else None
    if flip is None:
        return coins.bernoulli_(p)
    state = generator.get_state()
    if state.numel() != STATE_BYTES:
        return coins.bernoulli_(p)
    flip(state.data_ptr(), math.ceil(math.ldexp(p, 53)), coins.data_ptr(), coins.numel())
    generator.set_state(state)
    return coins


@functools.cache
def _compiled() -> Coins | None:
    try:
        flip = library("draws").encore_coins
    except BuildError as error:
        log.info("coins are flipped by PyTorch, one at a time: %s", error)
        return None
    flip.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64)
    flip.restype = None
    return flip
