"""Tuples, lists, dicts and what else PyTorch's pytrees know, with tensors at their ends; fast if they are flat.

A loop of a hundred thousand steps takes its carry apart as often, so that one tensor and a flat tuple of tensors go by
a short way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from encore.errors import OptionError
from encore.graph.torch_private import pytree


class Structure:
    """The shape of a tree whose ends are tensors, or `None`."""

    def __init__(self, tree: Any, what: str) -> None:
        self.what = what
        ends, self._spec = pytree.tree_flatten(tree)
        for end in ends:
            if end is not None and not isinstance(end, Tensor):
                raise OptionError(
                    f"{what} has a {type(end).__name__} in it, {end!r}; it can have tensors and None: make it a tensor"
                )
        self._empty = tuple(end is None for end in ends)
        self.count = self._empty.count(False)
        self._alone = isinstance(tree, Tensor)
        self._flat = type(tree) if type(tree) in (tuple, list) and ends == list(tree) and not any(self._empty) else None

    def flatten(self, tree: Any) -> list[Tensor]:
        """The tensors, in order; raises `OptionError` where the tree has another structure."""
        if self._alone and isinstance(tree, Tensor):
            return [tree]
        if self._flat is not None and type(tree) is self._flat and len(tree) == self.count:
            for end in tree:
                if not isinstance(end, Tensor):
                    break
            else:
                return list(tree)
        ends, spec = pytree.tree_flatten(tree)
        if spec != self._spec or tuple(end is None for end in ends) != self._empty:
            raise OptionError(f"{self.what} changes its structure: {_drawn(tree)} where {self} was before")
        for end in ends:
            if end is not None and not isinstance(end, Tensor):
                raise OptionError(f"{self.what} has a {type(end).__name__} in it where a tensor was before: {end!r}")
        return [end for end in ends if end is not None]

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with these tensors."""
        if self._alone:
            return tensors[0]
        if self._flat is not None:
            return self._flat(tensors)
        rest = iter(tensors)
        return pytree.tree_unflatten([None if empty else next(rest) for empty in self._empty], self._spec)

    def __str__(self) -> str:
        return _drawn(pytree.tree_unflatten([None if empty else "tensor" for empty in self._empty], self._spec))


def _drawn(tree: Any) -> str:
    drawn = pytree.tree_map(lambda end: "tensor" if isinstance(end, Tensor) else end, tree)
    return repr(drawn).replace("'tensor'", "tensor")
