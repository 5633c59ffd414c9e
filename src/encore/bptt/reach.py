"""Tensors that a step can reach, and so may write to.

What the first step writes to is known, and restored before a step is run again. A buffer that a later step is the first
to write to (statistics in a branch that is taken now and then) would be written again by every run. So the tensors that
the step can reach are noted before forward and checked after it: for another version, or for other numbers in a vector
of statistics, since operators of normalisations write those without a new version.

Reachable are closures, defaults, the globals that a function names, attributes, containers, modules. Tensors known only
to C++, or behind more than `MOST` objects, are not found.
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
"""Objects that are searched, nearest first."""
CHANNELS = 1 << 16
"""The longest vector that may be statistics."""
CLOSED = (type, types.ModuleType, types.FrameType, types.GeneratorType, types.CodeType, str, bytes, int, float)
"""Objects that are not searched further."""


def reachable(step: Callable[..., Any]) -> list[Tensor]:
    """Return the tensors that a function can reach, each once."""
    waiting: deque[Any] = deque([step])
    seen = {id(step)}
    found: list[Tensor] = []
    searched = 0
    while waiting and searched < MOST:
        one = waiting.popleft()
        searched += 1
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


class ReachableTensors:
    """The tensors that a step can reach, as they are when forward begins, but for those that are `known`."""

    def __init__(self, step: Callable[..., Any], known: Collection[int]) -> None:
        self._before: list[tuple[Tensor, int, int | None]] = []
        for tensor in reachable(step):
            if tensor.layout != torch.strided or tensor.is_inference():
                continue
            if tensor.device.type != "meta" and tensor.untyped_storage()._cdata not in known:
                self._before.append((tensor, tensor._version, _statistics(tensor)))

    def check(self) -> None:
        """Raise `ReplayError` if one was written to since."""
        for tensor, version, statistics in self._before:
            if tensor._version != version or _statistics(tensor) != statistics:
                raise ReplayError(
                    f"a later step wrote into a tensor of shape {tuple(tensor.shape)} ({tensor.dtype}) that the first "
                    "step did not write to; its old content is gone, and steps that are run again would write it "
                    "again: let every step write to it, or none, or give it its place in the carry"
                )


def _statistics(tensor: Tensor) -> int | None:
    """A checksum of what may be statistics of a normalisation: numbers by channel, without gradients."""
    if tensor.dim() != 1 or tensor.requires_grad or not tensor.is_floating_point() or len(tensor) > CHANNELS:
        return None
    return zlib.crc32(as_bytes(tensor).cpu().numpy().data)
