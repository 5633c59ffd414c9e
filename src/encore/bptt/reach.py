"""Tensors that a step can reach: what it could write to without anybody having told us.

What the first step writes to is known, and put back before a step is run again. A buffer that a later step is the first
to write to (statistics in a branch that is taken now and then) would be written again by every run. So the tensors that
the step can reach are noted before forward and looked at after it: a version that moved, or a vector of statistics that
holds other numbers, since operators of normalisations write those without a word.

Reach is what Python knows: closures, defaults, the globals that a function names, attributes, containers, modules. What
hides in C++, or lies behind more than `MOST` objects, is not seen.
"""

from __future__ import annotations

import functools
import gc
import types
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from encore.bptt.snapshot import as_bytes
from encore.errors import ReplayError

MOST = 20_000
"""Objects that are looked at, nearest first."""
CHANNELS = 1 << 16
"""A longer vector is not taken for statistics."""
CLOSED = (type, types.ModuleType, types.FrameType, types.GeneratorType, types.CodeType, str, bytes, int, float)
"""Objects behind which nothing of the step's is looked for."""


def reachable(step: Callable[..., Any]) -> list[Tensor]:
    """The tensors that a function can come by, each once."""
    waiting: deque[Any] = deque([step])
    seen = {id(step)}
    found: list[Tensor] = []
    looked_at = 0
    while waiting and looked_at < MOST:
        one = waiting.popleft()
        looked_at += 1
        if isinstance(one, Tensor):
            found.append(one)
            continue
        for other in _behind(one):
            if id(other) not in seen and not isinstance(other, CLOSED):
                seen.add(id(other))
                waiting.append(other)
    return found


def _behind(one: Any) -> Iterator[Any]:
    if isinstance(one, types.FunctionType):
        if f"{one.__module__}.".startswith(("torch.", "encore.bptt.")):
            return
        yield from one.__defaults__ or ()
        yield from (one.__kwdefaults__ or {}).values()
        for cell in one.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        for name in _names(one.__code__):
            if name in one.__globals__:
                yield one.__globals__[name]
    elif isinstance(one, types.MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    else:
        yield from gc.get_referents(one)


def _names(code: types.CodeType) -> Iterator[str]:
    """Of a function and of those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class Untold:
    """The tensors that a step can reach, as they are when forward begins, but for those that are known."""

    def __init__(self, step: Callable[..., Any], known: Collection[int]) -> None:
        self._before: list[tuple[Tensor, int, int | None]] = []
        for tensor in reachable(step):
            if tensor.layout != torch.strided or tensor.is_inference():
                continue
            if tensor.device.type != "meta" and tensor.untyped_storage()._cdata not in known:
                self._before.append((tensor, tensor._version, _statistics(tensor)))

    def check(self) -> None:
        """Raise `ReplayError` where one was written to since."""
        for tensor, version, statistics in self._before:
            if tensor._version != version or _statistics(tensor) != statistics:
                raise ReplayError(
                    f"a later step wrote into a tensor of shape {tuple(tensor.shape)} ({tensor.dtype}) that the first "
                    "step did not write to; what it held before is gone, and steps that are run again would write it "
                    "again: let every step write to it, or none, or give it its place in the carry"
                )


def _statistics(tensor: Tensor) -> int | None:
    """A sum over what may be statistics of a normalisation: numbers by channel, without gradients."""
    if tensor.dim() != 1 or tensor.requires_grad or not tensor.is_floating_point() or len(tensor) > CHANNELS:
        return None
    return zlib.crc32(as_bytes(tensor).cpu().numpy().data)
