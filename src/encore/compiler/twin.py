"""A fake twin of a model: the same modules and code, with fake tensors.

Capture runs on the twin as on the model, graph breaks included, so an estimate sees the same graphs as the first real
step. Real, meta and fake tensors are all accepted; a meta tensor is assumed to be on the CPU. What the functions of a
model (its hooks, for one) close over is copied, too, so that what they change belongs to the twin.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from encore.compiler.copies import CompiledMark
from encore.errors import OptionError
from encore.graph.torch_private import FakeTensorMode, pytree


@dataclass(frozen=True, slots=True)
class FakeTwin:
    """A callable and its arguments, with fake tensors."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    identities: dict[int, int]
    """The `id` of every fake tensor, and that of the tensor which it is the twin of."""
    is_separate: bool
    """Whether it shares no module with the callable, as far as can be seen."""


def fake_twin(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> FakeTwin:
    """Return a twin of a module, of a module's method, or of a function with all that it closes over."""
    copier = _Copier(mode)
    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, copier.fake, (args, kwargs))
    owner = getattr(model, "__self__", None)
    try:
        if isinstance(owner, nn.Module):
            call = model.__func__.__get__(copier.copied(owner))  # type: ignore[attr-defined]
        elif isinstance(model, nn.Module | types.FunctionType):
            call = copier.copied(model)
        else:
            call = model
    except Exception as error:
        name = type(owner if isinstance(owner, nn.Module) else model).__name__
        raise OptionError(
            f"{name} cannot be copied without its memory ({str(error).splitlines()[0]}); "
            "an estimate needs a module that copy.deepcopy accepts, with all parameters initialised"
        ) from error
    identities = {id(fake): real for real, fake in copier.fakes.items()}
    return FakeTwin(call, fake_args, fake_kwargs, identities, call is not model and not _reaches_modules(call))


class _Copier:
    """Copies modules and functions with fake tensors in the place of theirs."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.memo: dict[int, Any] = {}
        """Of `copy.deepcopy`: what stands for each object."""
        self.fakes: dict[int, torch.Tensor] = {}
        self._cells: list[tuple[types.CellType, types.CellType]] = []

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.fakes:
            self.memo[id(tensor)] = self.fakes[id(tensor)] = _fake(tensor, self.mode)
        return self.fakes[id(tensor)]

    def copied(self, thing: Any) -> Any:
        """The copy of a module, a function, or what a function closes over."""
        self._prepare(thing)
        result = copy.deepcopy(thing, self.memo)
        while self._cells:
            theirs, own = self._cells.pop()
            contents = theirs.cell_contents
            own.cell_contents = contents if _is_of_pytorch(contents) else self.copied(contents)
        if isinstance(result, nn.Module):
            CompiledMark.remove(result)
        return result

    def _prepare(self, thing: Any) -> None:
        """Have fake tensors, and functions with cells of their own, ready for `copy.deepcopy`."""
        for part in _parts(thing):
            if isinstance(part, torch.Tensor):
                self.fake(part)
            elif isinstance(part, types.FunctionType) and part.__closure__ and id(part) not in self.memo:
                self.memo[id(part)] = self._with_own_cells(part)

    def _with_own_cells(self, function: types.FunctionType) -> types.FunctionType:
        theirs = function.__closure__ or ()
        own = tuple(types.CellType() for _ in theirs)
        self._cells += [(cell, mine) for cell, mine in zip(theirs, own, strict=True) if _is_filled(cell)]
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, own
        )
        copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
        copied.__module__ = function.__module__
        copied.__dict__.update(function.__dict__)
        return copied


def _parts(thing: Any) -> Iterator[Any]:
    """What a module, or anything else that a function closes over, consists of, as far as can be seen."""
    for leaf in pytree.tree_leaves(thing):
        if isinstance(leaf, nn.Module):
            for module in leaf.modules():
                yield from pytree.tree_leaves(vars(module))
        else:
            yield leaf


def _is_of_pytorch(thing: Any) -> bool:
    """Return whether it is an object by which a wrapper of PyTorch's does its work, and no part of a model."""
    ours = isinstance(thing, nn.Module | torch.Tensor | types.FunctionType)
    return not ours and type(thing).__module__.partition(".")[0] == "torch"


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if it is empty
    except ValueError:
        return False
    return True


def _reaches_modules(call: Any) -> bool:
    """Return whether a function reads modules or parameters from variables of its file."""
    found = (call.__globals__.get(name) for name in call.__code__.co_names) if hasattr(call, "__globals__") else ()
    return any(isinstance(one, nn.Module | torch.Tensor) for one in found)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)
