"""The systems that Encore is compared with, each a function from a model to what trains in its place.

Inductor draws random numbers from a generator of its own: with `OWN_DRAWS`, a model with dropout gets other masks than
in eager, and gradients that cannot be compared.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from encore.compare.torch_private import compile_fx, forward_unimplemented, functorch_config


def eager(model: Any) -> Any:
    """PyTorch as it is."""
    return model


def compiled(model: Any) -> Any:
    """`torch.compile` as it is."""
    return torch.compile(model)


def within_budget(model: Any, setting: float) -> Any:
    """`torch.compile` with `activation_memory_budget`. Each setting is a backend of its own: Dynamo would reuse the
    code of another setting."""

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(activation_memory_budget=setting):
            return compile_fx(module, inputs)  # type: ignore[arg-type]

    return torch.compile(model, backend=backend)


OWN_DRAWS = (compiled, within_budget)


def draws_its_own(prepare: Callable[..., Any]) -> bool:
    """Return whether this system draws other random numbers than eager does."""
    return getattr(prepare, "func", prepare) in OWN_DRAWS


def checkpointed(model: nn.Module, classes: Collection[str] | None = None) -> nn.Module:
    """The model with `torch.utils.checkpoint` around every block: around modules of these classes or, by default,
    around those that `repeated_blocks` finds."""
    if classes is None:
        blocks = repeated_blocks(model)
    else:
        blocks = [module for module in model.modules() if type(module).__name__ in classes]
    for block in blocks:
        block.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, copy.copy(block.forward), use_reentrant=False
        )
    return model


def repeated_blocks(model: Any) -> list[nn.Module]:
    """The blocks that a model repeats: modules of a class that occurs at least twice and is not part of another such
    class. `nn.Sequential` counts only where no other class is repeated. Empty for a model without repeated blocks."""
    if not isinstance(model, nn.Module):
        return []
    inner = [module for module in model.modules() if module is not model and _may_be_a_block(module)]
    own = [module for module in inner if type(module) is not nn.Sequential]
    return _outermost(model, own) or _outermost(model, inner)


def _may_be_a_block(module: nn.Module) -> bool:
    """Return whether a checkpoint around this module can free anything: one with parameters that computes more than a
    single layer of `torch.nn`."""
    if type(module).forward is forward_unimplemented or not any(True for _ in module.parameters()):
        return False
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")


def _outermost(model: nn.Module, candidates: Sequence[nn.Module]) -> list[nn.Module]:
    counts = Counter(type(module) for module in candidates)
    repeated = {kind for kind, count in counts.items() if count > 1}
    inside = {
        type(part)
        for module in candidates
        if type(module) in repeated
        for part in module.modules()
        if type(part) is not type(module)
    }
    return list(_topmost(model, repeated - inside))


def _topmost(module: nn.Module, classes: Collection[type]) -> Iterator[nn.Module]:
    """Modules of these classes that lie in no other of them."""
    for child in module.children():
        if type(child) in classes:
            yield child
        else:
            yield from _topmost(child, classes)
