"""The accesses of a compiled step's operators, for the order of work: their kernels do not say what they read and
write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from encore.graph.torch_private import OpOverload
from encore.lower.calls import callable_for
from nullcuda.null_device import note_kernel


@contextlib.contextmanager
def noted_operators() -> Iterator[None]:
    """Steps that are compiled here note that their operators read their operands, and write to their results and to
    operands that they change, on the current stream. Workspaces are not seen."""
    with mock.patch("encore.lower.codegen.callable_for", _noted):
        yield


def _noted(target: Any) -> Callable[..., Any]:
    call = callable_for(target)
    if not isinstance(target, OpOverload):
        return call
    arguments, results = target._schema.arguments, target._schema.returns
    if any(result.alias_info is not None and not result.alias_info.is_write for result in results):
        return call  # a view
    changed = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}

    def run(*args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        names = [argument.name for argument in arguments]
        for name, given in (*zip(names, args, strict=False), *kwargs.items()):
            _note(target, given, writes=name in changed)
        _note(target, found, writes=True)
        return found

    return run


def _note(target: OpOverload, tree: Any, *, writes: bool) -> None:
    for tensor in pytree.tree_leaves(tree):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            note_kernel(tensor, writes=writes, what=str(target))
