"""The stack of saved-tensor hooks: which pair is innermost, and code that runs without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
_autograd: Any = torch._C._autograd


def top_saved_tensors_hooks() -> Hooks | None:
    """The innermost pair of hooks; None if there is none."""
    found: Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
    return found


@contextlib.contextmanager
def without_top_saved_tensors_hooks() -> Iterator[None]:
    """What runs inside does not see the innermost pair of hooks."""
    pack, unpack = _autograd._top_saved_tensors_default_hooks(True)
    _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
