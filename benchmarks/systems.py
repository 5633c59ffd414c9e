"""What people would use instead: each as a function from a model to something that trains like it.

`OWN_DRAWS` names those whose random numbers are not eager's: Inductor has a generator of its own, so that a model with
dropout gets other masks, and gradients that cannot be compared.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint


def eager(model: nn.Module) -> nn.Module:
    """PyTorch as it is."""
    return model


def compiled(model: nn.Module) -> Any:
    """`torch.compile` as it is."""
    return torch.compile(model)


def within_budget(model: nn.Module, setting: float) -> Any:
    """`torch.compile` with a memory budget. A backend of its own: Dynamo would take the code of another setting."""

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(activation_memory_budget=setting):
            return compile_fx(module, inputs)  # type: ignore[arg-type]

    return torch.compile(model, backend=backend)


OWN_DRAWS = (compiled, within_budget)


def draws_its_own(prepare: Callable[..., Any]) -> bool:
    """Does this system draw other random numbers than eager does?"""
    return getattr(prepare, "func", prepare) in OWN_DRAWS


def checkpointed(model: nn.Module, classes: Sequence[str]) -> nn.Module:
    """The model with a checkpoint around every block, as one would write it by hand."""
    for module in model.modules():
        if type(module).__name__ in classes:
            module.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, copy.copy(module.forward), use_reentrant=False
            )
    return model


class SavedOnCpu(nn.Module):
    """The model under `torch.autograd.graph.save_on_cpu`: what backward needs is copied to the host's memory, and back.
    On a machine without another device that is a copy from memory to memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.model(*args)
