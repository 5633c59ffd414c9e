"""A fake twin of a model: the same modules and code, with fake tensors.

Capture runs on the twin as on the model, graph breaks included, so an estimate sees the same graphs as the first real
step. Real, meta and fake tensors are all accepted; a meta tensor is assumed to be on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from encore.capture import torch_private
from encore.compiler.compiled import CompiledCall
from encore.compiler.copies import CompiledMark
from encore.compiler.session import Session
from encore.errors import OptionError
from encore.graph.torch_private import pytree


def fake_twin(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]:
    """Return model and arguments with fake tensors, and their mode. A plain function is returned as it is."""
    mode = torch_private.fake_mode()
    memo: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(tensor, mode)
        return memo[id(tensor)]

    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    if isinstance(model, nn.Module):
        try:
            for tensor in _tensors_of(model):
                fake(tensor)
            model = copy.deepcopy(model, memo)
            CompiledMark.remove(model)
        except Exception as error:
            raise OptionError(
                f"{type(model).__name__} cannot be copied without its memory ({str(error).splitlines()[0]}); "
                "an estimate needs a module that copy.deepcopy accepts, with all parameters initialised"
            ) from error
    return model, fake_args, fake_kwargs, mode


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from (thing for thing in pytree.tree_leaves(vars(module)) if isinstance(thing, torch.Tensor))


def _fake(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def run_forward_without_memory(
    twin: Callable[..., Any], session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any
) -> None:
    """Run forward on fake tensors, so that Dynamo finds the graphs of a training step; each joint graph has its
    backward."""
    with mode, torch.enable_grad():
        CompiledCall(twin, session)(*args, **kwargs)
