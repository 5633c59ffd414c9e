"""A model without memory: the same modules and code, with tensors that know their shape and hold no bytes.

Capture runs on the twin exactly as it would on the model, graph breaks included, so an estimate sees the same graphs
as the first real step. Real, meta and fake tensors are all accepted; a meta tensor is taken to live on the CPU.
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
    """Model, arguments and the mode they live in, none of them holding memory. A plain function stays itself."""
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
                "an estimate wants a module that copy.deepcopy accepts, with all parameters initialised"
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
    """Let Dynamo find the graphs of a training step; the backward comes with each joint graph."""
    with mode, torch.enable_grad():
        CompiledCall(twin, session)(*args, **kwargs)
