"""How a recurrent operator becomes known to PyTorch, and to whoever predicts memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("encore", "FRAGMENT")

WORKSPACES: dict[Any, Callable[..., int]] = {}
"""Operator -> bytes that a call takes aside and gives back, from its own arguments: fake tensors will do."""


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], workspace: Callable[..., int],
    differentiate: Callable[..., Any], save: Callable[..., None],
) -> None:  # fmt: skip
    """Define `encore::<name>` with its kernel for every device, its shapes, its workspace and its derivative."""
    name = schema.partition("(")[0]
    _library.define(schema)
    # Dynamo would trace into the kernel where a compiled graph calls it.
    _library.impl(name, torch.compiler.disable(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"encore::{name}", fake, lib=_library)
    torch.library.register_autograd(f"encore::{name}", differentiate, setup_context=save, lib=_library)
    WORKSPACES[getattr(torch.ops.encore, name).default] = workspace
