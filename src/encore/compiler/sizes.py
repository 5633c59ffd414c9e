"""The shapes of the tensors among the arguments of a call.

Numbers and texts are not looked at: a graph that reads them is specialized to them by Dynamo's guards, and one that
does not, such as that of a `training_step(batch, batch_idx)`, is the same for all.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from encore.rnn.packed_rows import PackedRows

Sizes = tuple[Any, ...]
"""An entry for each tensor (its shape) and container among the arguments, in their order."""

Dimensions = dict[int, frozenset[int]]
"""Dimensions of tensors, by the place of the tensor among the sizes."""
SMALLEST_SYMBOL = 2
"""Dynamo takes sizes 0 and 1 for constants."""

DEEPEST = 8
"""Levels of nested arguments that are looked at."""


def sizes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sizes:
    """Return the shapes of the tensors among the arguments."""
    return tuple(_SizesWalk().through((("", one) for one in args), kwargs).sizes)


def sized_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor | None]:
    """Return the tensor of each of the sizes; None for containers."""
    walk = _SizesWalk(tensors=[])
    walk.through((("", one) for one in args), kwargs)
    assert walk.tensors is not None
    return walk.tensors


def differing(one: Sizes, other: Sizes) -> Dimensions | None:
    """The dimensions in which two calls differ; None if they differ in more than sizes."""
    if len(one) != len(other):
        return None
    found: Dimensions = {}
    for place, (mine, its) in enumerate(zip(one, other, strict=True)):
        if mine == its:
            continue
        if not (_is_shape(mine) and _is_shape(its) and len(mine) == len(its)):
            return None
        found[place] = frozenset(number for number, pair in enumerate(zip(mine, its, strict=True)) if len({*pair}) > 1)
    return found


def is_within(sizes: Sizes, like: Sizes, dimensions: Dimensions) -> bool:
    """Return whether a call differs from another one in some dimensions alone, and has sizes there that a symbol may
    stand for."""
    found = differing(sizes, like)
    if found is None or any(not its <= dimensions.get(place, frozenset()) for place, its in found.items()):
        return False
    return all(sizes[place][number] >= SMALLEST_SYMBOL for place, its in dimensions.items() for number in its)


def _is_shape(size: Any) -> bool:
    return isinstance(size, tuple) and all(isinstance(one, int) for one in size)


def named_sizes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return a name for each of the sizes, by the parameters of the function."""
    walk = _SizesWalk(names=[])
    walk.through(zip(parameter_names(function, len(args)), args, strict=True), kwargs)
    assert walk.names is not None
    return walk.names


@dataclasses.dataclass(slots=True)
class _SizesWalk:
    """A walk through arguments."""

    sizes: list[Any] = dataclasses.field(default_factory=list)
    names: list[str] | None = None
    """One for each of the sizes, if they are asked for."""
    tensors: list[torch.Tensor | None] | None = None
    """The same."""

    def through(self, args: Iterable[tuple[str, Any]], kwargs: Mapping[str, Any]) -> _SizesWalk:
        for name, argument in args:
            self._see(argument, name, 0)
        if kwargs:
            self._add(tuple(kwargs), "")
            for name, argument in kwargs.items():
                self._see(argument, name, 0)
        return self

    def _see(self, thing: Any, name: str, level: int) -> None:
        if isinstance(thing, torch.Tensor):
            self._add(None if thing.layout is torch.jagged else tuple(thing.shape), name, thing)
        elif level < DEEPEST and (inside := _inside(thing)) is not None:
            self._add(type(thing), name)
            for key, one in inside:
                self._see(one, name if self.names is None else f"{name}{key}", level + 1)
            self._add(None, name)

    def _add(self, size: Any, name: str, tensor: torch.Tensor | None = None) -> None:
        self.sizes.append(size)
        if self.tensors is not None:
            self.tensors.append(tensor)
        if self.names is not None:
            self.names.append(name)


def _inside(thing: Any) -> list[tuple[Any, Any]] | None:
    """What a container has inside, by the text that follows its name."""
    if isinstance(thing, list | tuple):
        fields = getattr(thing, "_fields", None)
        return [(f"[{place}]" if fields is None else f".{fields[place]}", one) for place, one in enumerate(thing)]
    if isinstance(thing, Mapping):
        return [(f"[{key!r}]", one) for key, one in thing.items()]
    if isinstance(thing, PackedRows):
        return [(".data", thing.source), (".batch_sizes", thing.numbers)]
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [(f".{one.name}", getattr(thing, one.name, None)) for one in dataclasses.fields(thing)]
    return None


def parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """Return names for so many positional arguments of a function; of a module, those of its `forward`."""
    owner = getattr(function, "__self__", function)
    called = owner.forward if isinstance(owner, torch.nn.Module) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # it has no signature
        parameters = []
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    more = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "argument")
    return [*positional[:count], *(f"{more} {place}" for place in range(count - len(positional)))]
