"""Which pieces of data are kept from training. A piece's own bytes decide, so the answer needs no list and no order."""

import zlib
from collections.abc import Callable
from typing import TypeVar

import torch

Piece = TypeVar("Piece")

ONE_IN = 10


def is_held_out(text: str) -> bool:
    """Every tenth text, give or take, is scored on and never trained on."""
    return zlib.crc32(text.encode()) % ONE_IN == 0


def draw(
    make: Callable[[torch.Generator], Piece],
    text_of: Callable[[Piece], str],
    generator: torch.Generator,
    *,
    held_out: bool,
) -> Piece:
    """A random piece from one side of the split: drawn again until it is one."""
    while is_held_out(text_of(piece := make(generator))) != held_out:
        pass
    return piece
