"""Where inputs come from: tensors, something that can be indexed, or an iterator, which gives each input only once.

Steps are run again, and their inputs are needed again. Tensors and indexed sources return them again. What an iterator
gave is kept: in memory or, interval by interval, in the tier next to the states.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from encore.bptt.trees import Structure
from encore.errors import EncoreError, OptionError
from encore.graph.torch_private import pytree
from encore.tiers import Parcel

AT_ONCE = 256
"""Inputs that are cut together."""


class Source(abc.ABC):
    """Inputs by step."""

    length: int | None
    tensors: tuple[Tensor, ...] = ()
    """Those that may require gradients."""

    @abc.abstractmethod
    def items(self, start: int, stop: int) -> Iterator[Any]:
        """Inputs of steps `start` to `stop` - 1; fewer if they end before."""

    def with_leaves(self, start: int, stop: int) -> tuple[Iterator[Any], list[Tensor | None]]:
        """The same, as parts of new leaves: one for each of `tensors`, `None` if it requires no gradient."""
        return self.items(start, stop), []

    def rows(self, start: int, stop: int) -> slice:
        """Where the inputs of these steps are along the first dimension of `tensors`."""
        return slice(start, stop)


class NoInputs(Source):
    """`xs=None`: steps that take nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def items(self, start: int, stop: int) -> Iterator[Any]:
        for _ in range(start, stop):
            yield None


class Tensors(Source):
    """A tree of tensors, cut along their first dimension."""

    def __init__(self, xs: Any, length: int | None) -> None:
        self._structure = Structure(xs, "xs")
        self.tensors = tuple(self._structure.flatten(xs))
        lengths = {tensor.shape[0] if tensor.dim() else None for tensor in self.tensors}
        lengths |= set() if length is None else {length}
        if len(lengths) != 1 or None in lengths:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors)
            given = "" if length is None else f", and length={length}"
            raise OptionError(f"xs must agree in their first dimension, which is time; there are {shapes}{given}")
        self.length = int(lengths.pop() or 0)
        self._values = [tensor.detach() for tensor in self.tensors]

    def items(self, start: int, stop: int) -> Iterator[Any]:
        for begin in range(start, stop, AT_ONCE):
            yield from self._cut([value[begin : min(stop, begin + AT_ONCE)] for value in self._values])

    def with_leaves(self, start: int, stop: int) -> tuple[Iterator[Any], list[Tensor | None]]:
        parts = [value[start:stop] for value in self._values]
        leaves: list[Tensor | None] = []
        for part, tensor in zip(parts, self.tensors, strict=True):
            leaves.append(part.requires_grad_() if tensor.requires_grad else None)
        return self._cut(parts), leaves

    def _cut(self, parts: Sequence[Tensor]) -> Iterator[Any]:
        return map(self._structure.unflatten, zip(*(part.unbind(0) for part in parts), strict=True))


class Pieces(Source):
    """A tensor with time first, `chunk` steps of it at a time; the last piece may be shorter."""

    def __init__(self, x: Tensor, chunk: int) -> None:
        self.tensors = (x,)
        self.chunk = chunk
        self.length = -(-len(x) // chunk)
        self._value = x.detach()

    def items(self, start: int, stop: int) -> Iterator[Any]:
        for step in range(start, stop):
            yield self._value[self.rows(step, step + 1)]

    def with_leaves(self, start: int, stop: int) -> tuple[Iterator[Any], list[Tensor | None]]:
        part = self._value[self.rows(start, stop)]
        wanted = self.tensors[0].requires_grad
        return iter(part.requires_grad_(wanted).split(self.chunk)), [part if wanted else None]

    def rows(self, start: int, stop: int) -> slice:
        return slice(start * self.chunk, min(stop * self.chunk, len(self._value)))


class Indexed(Source):
    """Anything with `__len__` and `__getitem__`: read again when it is needed again, never kept."""

    def __init__(self, xs: Any, length: int | None) -> None:
        self._xs = xs
        if length is not None and length > len(xs):
            raise OptionError(f"length={length}, and xs has {len(xs)} steps; give no more than there are")
        self.length = len(xs) if length is None else length

    def items(self, start: int, stop: int) -> Iterator[Any]:
        for step in range(start, stop):
            yield _without_gradients(self._xs[step])


class Once(Source):
    """An iterator: what it gave is kept until backward has passed it."""

    def __init__(self, xs: Iterator[Any], length: int | None) -> None:
        self._xs = xs
        self.length = length
        self._items: dict[int, Any] = {}
        self._seen = 0
        self._parcels: dict[int, tuple[Parcel, list[Any]]] = {}

    def items(self, start: int, stop: int) -> Iterator[Any]:
        for step in range(start, stop):
            if step in self._items:
                yield self._items[step]
            elif step == self._seen:
                try:
                    item = next(self._xs)
                except StopIteration:
                    if self.length is not None:
                        raise OptionError(f"xs ended after {step} of length={self.length} steps") from None
                    return
                self._items[step] = _without_gradients(item)
                self._seen += 1
                yield self._items[step]
            else:
                raise EncoreError(f"the input of step {step} is in the tier; this is a bug in Encore")

    def offload(self, start: int, stop: int, store: Callable[[list[Tensor]], Parcel]) -> None:
        """Move the inputs of an interval to the tier, by its first step."""
        items = [self._items.pop(step) for step in range(start, stop)]
        ends, spec = pytree.tree_flatten(items)
        tensors = [end for end in ends if isinstance(end, Tensor)]
        others = [None if isinstance(end, Tensor) else (end,) for end in ends]
        if tensors:
            self._parcels[start] = store(tensors), [spec, others]
        else:
            self._items.update(zip(range(start, stop), items, strict=True))

    def prefetch(self, start: int) -> None:
        if start in self._parcels:
            parcel, _ = self._parcels[start]
            parcel.tier.prefetch(parcel)

    def reload(self, start: int) -> None:
        if start in self._parcels:
            parcel, (spec, others) = self._parcels.pop(start)
            try:
                tensors = iter(parcel.tier.load(parcel))
            finally:
                parcel.tier.free(parcel)
            items = pytree.tree_unflatten([next(tensors) if other is None else other[0] for other in others], spec)
            self._items.update(zip(range(start, start + len(items)), items, strict=True))

    def forget(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self._items.pop(step, None)

    @property
    def parcels(self) -> dict[int, tuple[Parcel, list[Any]]]:
        """Inputs in a tier, by the first step of their interval."""
        return self._parcels


def _without_gradients(item: Any) -> Any:
    for end in pytree.tree_leaves(item):
        if isinstance(end, Tensor) and end.requires_grad and torch.is_grad_enabled():
            raise OptionError(
                "an input from an iterator requires a gradient, which a scan cannot return; give xs as tensors"
            )
    return item


def source_of(xs: Any, length: int | None) -> Source:
    """Return what the user gave as a source: tensors (in tuples, lists, dicts), what can be indexed, or an iterator."""
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
        raise OptionError(f"length={length!r} is not a number of steps")
    if isinstance(xs, Source):
        return xs
    if xs is None:
        if length is None:
            raise OptionError("without xs the number of steps is not known; give length=")
        return NoInputs(length)
    if isinstance(xs, Tensor | tuple | list | dict):
        if not pytree.tree_leaves(xs):
            raise OptionError("xs has no tensor in it; for steps without inputs give xs=None and length=")
        return Tensors(xs, length)
    if hasattr(xs, "__len__") and hasattr(xs, "__getitem__"):
        return Indexed(xs, length)
    if hasattr(xs, "__iter__"):
        return Once(iter(xs), length)
    raise OptionError(f"xs is a {type(xs).__name__}; give tensors with time first, a sequence, or an iterator")
