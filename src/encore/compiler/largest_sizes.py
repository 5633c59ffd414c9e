"""Sizes of the largest batch, by the names of arguments or by dimension, and the batch of these sizes.

A batch of these sizes is made like one that is there, of which it takes the dtypes, devices and layouts; it is made of
fake tensors, which have no memory and no contents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from encore.compiler.sizes import parameter_names
from encore.errors import OptionError, listed
from encore.graph.torch_private import FakeTensorMode, pytree
from encore.units import shown

ACCEPTED = "{'words': (32, 512)}, {'words': (None, 512)}, {'words': {1: 512}} or {1: 512}"

DimensionSizes = Mapping[int, int]
"""The sizes of some dimensions."""


@dataclass(frozen=True, slots=True)
class LargestSizes:
    """What is to be different from the batch that is there."""

    of_all: DimensionSizes
    """Of every tensor that has the dimension."""
    of_named: Mapping[str, DimensionSizes]
    """Of single arguments."""
    ranks: Mapping[str, int]
    """Of the arguments whose sizes were given as a tuple: how many there were."""

    @classmethod
    def read(cls, given: Any) -> LargestSizes | None:
        """Read what the user gave as `largest=`; None if it is an example of a batch."""
        if not isinstance(given, Mapping) or not given:
            return None
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(list(given.values()))):
            return None
        of_all: dict[int, int] = {}
        of_named: dict[str, DimensionSizes] = {}
        ranks: dict[str, int] = {}
        for key, value in given.items():
            if _is_integer(key):
                of_all[key] = _checked(key, value)
            elif not isinstance(key, str):
                raise OptionError(
                    f"largest= has the key {shown(key)}; give names of arguments or dimensions: {ACCEPTED}"
                )
            elif isinstance(value, Mapping) and value and all(map(_is_integer, value)):
                of_named[key] = {dimension: _checked(key, size) for dimension, size in value.items()}
            elif isinstance(value, tuple | list) and value:
                sizes = {place: size for place, size in enumerate(value) if size is not None}
                of_named[key] = {place: _checked(key, size) for place, size in sizes.items()}
                ranks[key] = len(value)
            else:
                raise OptionError(
                    f"largest= has {shown(value)} for {key!r}, which is neither a tensor nor sizes of one; give sizes "
                    f"such as {ACCEPTED}, or an example of the largest batch, in which all arguments are values"
                )
        return cls(of_all, of_named, ranks)

    def require_parameters(self, functions: list[Callable[..., Any]]) -> None:
        """Raise if a name is no parameter of these functions."""
        known: dict[str, None] = {}
        for function in functions:
            try:
                parameters = inspect.signature(function).parameters.values()
            except (TypeError, ValueError):  # it has no signature
                return
            if any(one.kind is one.VAR_KEYWORD for one in parameters):
                return
            known |= dict.fromkeys(one.name for one in parameters)
        for name in self.of_named:
            if name.split("[")[0].split(".")[0].split(" ")[0] not in known:
                raise OptionError(f"largest= names {name!r}, which is no parameter; the model has {listed(known)}")

    def batch(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], str]:
        """Return the arguments of a batch of these sizes, and its shapes as text."""
        names = parameter_names(function, len(args))
        flat, spec = pytree.tree_flatten_with_path((args, dict(kwargs)))
        places = {_name_of(path, names): place for place, (path, _) in enumerate(flat)}
        leaves = [leaf for _, leaf in flat]
        tensors = {name: leaves[place] for name, place in places.items() if isinstance(leaves[place], torch.Tensor)}
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        self._require_tensors(tensors, given)
        mode, texts = FakeTensorMode(), []
        for name, tensor in tensors.items():
            sizes = self._sizes(name, tensor)
            leaves[places[name]] = _resized(tensor, sizes, mode)
            texts.append(f"{name} {sizes}")
        new_args, new_kwargs = pytree.tree_unflatten(leaves, spec)
        return new_args, new_kwargs, ", ".join(texts)

    def _require_tensors(self, tensors: Mapping[str, torch.Tensor], given: Mapping[str, Any]) -> None:
        """Raise unless the batch has tensors of the given names and dimensions."""
        packed = any(isinstance(one, PackedSequence) for one in given.values())
        if packed or any(tensor.layout is not torch.strided for tensor in tensors.values()):
            what = "a PackedSequence" if packed else "a tensor that is not strided"
            raise OptionError(f"largest= has sizes, and the batch has {what}; give an example of the largest batch")
        for name in self.of_named:
            if name in tensors:
                continue
            if name in given:
                what = f"{name!r} is a {type(given[name]).__name__} in this batch, not a tensor"
                raise OptionError(
                    f"largest= has sizes for {name!r}, but {what}; name tensors ({listed(tensors)}), or give "
                    "an example of the largest batch"
                )
            raise OptionError(
                f"largest= has sizes for {name!r}, which this batch does not have, so that its dtype is not known; it "
                f"has {listed(tensors)}. Name one of these, or give an example of the largest batch"
            )
        for dimension in self.of_all:
            if not any(_has(tensor, dimension) for tensor in tensors.values()):
                shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
                raise OptionError(f"largest= has dimension {dimension}, and no tensor of the batch has it: {shapes}")

    def _sizes(self, name: str, tensor: torch.Tensor) -> list[int]:
        """The sizes of one tensor of the largest batch."""
        sizes = list(tensor.shape)
        for dimension, size in self.of_all.items():
            if _has(tensor, dimension):
                sizes[dimension] = size
        rank = self.ranks.get(name, tensor.dim())
        own = self.of_named.get(name, {})
        if rank != tensor.dim() or not all(_has(tensor, dimension) for dimension in own):
            count = f"{rank} sizes" if rank != tensor.dim() else f"dimensions {listed(own)}"
            raise OptionError(
                f"largest= has {count} for {name!r}, which has {tensor.dim()} dimensions: {list(tensor.shape)} in this "
                "batch; give a size for each of them, or None to leave it as it is"
            )
        for dimension, size in own.items():
            sizes[dimension] = size
        return sizes


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(key: Any, size: Any) -> int:
    if not _is_integer(size) or size < 1:
        raise OptionError(f"largest= has the size {shown(size)} for {key!r}; give a number of at least 1: {ACCEPTED}")
    return int(size)


def _has(tensor: torch.Tensor, dimension: int) -> bool:
    return -tensor.dim() <= dimension < tensor.dim()


def _name_of(path: Any, names: list[str]) -> str:
    """The name of a part of the arguments: that of the argument, and where in it the part is."""
    kind, place, *inside = path
    outer = names[place.idx] if kind.idx == 0 else str(place.key)
    return outer + "".join(map(str, inside))


def _resized(tensor: torch.Tensor, sizes: list[int], mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of these sizes, whose dimensions lie in memory in the same order."""
    order, strides = list(range(tensor.dim())), tensor.stride()
    if not tensor.is_contiguous():
        order.sort(key=lambda dimension: -strides[dimension])
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        laid = torch.empty([sizes[dimension] for dimension in order], dtype=tensor.dtype, device=device)
        found = laid.permute([order.index(dimension) for dimension in range(tensor.dim())])
    return found.requires_grad_(tensor.requires_grad)
