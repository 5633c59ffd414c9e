"""How an operator on codes becomes known to PyTorch, and to whoever predicts memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from encore.errors import OptionError, listed

_library = torch.library.Library("encore", "FRAGMENT")

WORKSPACES: dict[Any, Callable[..., int]] = {}
"""Operator -> bytes that a call takes aside and gives back, from its own arguments: fake tensors will do."""


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], workspace: Callable[..., int]
) -> torch._ops.OpOverload:
    """Define `encore::<name>` with a kernel for every device, its shapes, and what it takes aside.

    A device may have a kernel of its own: registered under its dispatch key, it goes before this one.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    # Dynamo would trace into the kernel where a compiled graph calls it.
    _library.impl(name, torch.compiler.disable(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"encore::{name}", fake, lib=_library)
    overload: torch._ops.OpOverload = getattr(torch.ops.encore, name).default
    WORKSPACES[overload] = workspace
    return overload


def empty_code(x: Tensor, nbytes: int) -> Tensor:
    """The result of an encoding."""
    return x.new_empty((nbytes,), dtype=torch.uint8)


def check_dtype(name: str, dtype: torch.dtype, accepted: Sequence[torch.dtype]) -> None:
    if dtype not in accepted:
        raise OptionError(f"encore::{name} holds {listed(accepted)}; got {dtype}: keep it as it is, or convert it")


def check_code(name: str, code: Tensor, least: int) -> None:
    """A code that is too short would be read beyond its end."""
    if code.dtype is not torch.uint8 or code.dim() != 1 or not code.is_contiguous():
        raise OptionError(f"encore::{name} reads one contiguous run of bytes, as its encoder made it; got "
                          f"{code.dtype}{list(code.shape)}")  # fmt: skip
    if code.numel() < least:
        raise OptionError(
            f"encore::{name} was given a code of {code.numel()} bytes where size and stride call for {least}: decode "
            "with the size and stride of the tensor that was encoded"
        )


def nothing(*_: Any) -> int:
    """The workspace of an operator that takes none."""
    return 0


def fake_code(x: Tensor, most: int) -> Tensor:
    """A code whose size the data decides: unknown where sizes may be, else the most that it can be."""
    nbytes: int | torch.SymInt = most
    with contextlib.suppress(RuntimeError):  # sizes are pinned, or this is the meta device
        nbytes = torch.library.get_ctx().new_dynamic_size(max=most)
    return x.new_empty((nbytes,), dtype=torch.uint8)


def fake_decoded(code: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *_: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=code.device)
