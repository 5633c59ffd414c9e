"""How an operator on codes is defined: its kernel, its shapes, and its workspace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from encore.codecs.layout import elements_of, gathered_bytes, layout_like, layout_of
from encore.codecs.torch_private import OpOverload, untraced
from encore.errors import OptionError, listed

_library = torch.library.Library("encore", "FRAGMENT")

WORKSPACES: dict[OpOverload, Callable[..., int]] = {}
"""Operator -> bytes that a call allocates and frees, from its own arguments: fake tensors will do."""


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], workspace: Callable[..., int]) -> OpOverload:
    """Define `encore::<name>` with a kernel for every device, its shapes and its workspace.

    A device may have a kernel of its own: registered under its dispatch key, it goes before this one.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    # Dynamo would trace into the kernel where a compiled graph calls it.
    _library.impl(name, untraced(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"encore::{name}", fake, lib=_library)
    overload: OpOverload = getattr(torch.ops.encore, name).default
    WORKSPACES[overload] = workspace
    return overload


def define_encoder(
    schema: str,
    write: Callable[..., Tensor],
    size: Callable[..., int],
    workspace: Callable[..., int],
    exact: Callable[..., bool] = lambda *_: True,
) -> OpOverload:
    """Define `encore::<name>(x, options) -> code` from what `Coding` has, all of which is about runs of elements."""

    def run(x: Tensor, *options: Any) -> Tensor:
        return write(elements_of(x), *options)

    def fake(x: Tensor, *options: Any) -> Tensor:
        most = size(layout_like(x).count, x.dtype, *options)
        return empty_code(x, most) if exact(*options) else _code_of_unknown_size(x, most)

    def taken(x: Tensor, *options: Any) -> int:
        gathered = gathered_bytes(x.shape, x.stride(), x.dtype)
        return gathered + workspace(layout_like(x).count, x.dtype, x.device, *options)

    return define(schema, run, fake, taken)


def taken_to_decode(workspace: Callable[..., int]) -> Callable[..., int]:
    """The workspace of a decoder, from that of `Coding`."""

    def taken(code: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *options: Any) -> int:
        count = layout_of(size, stride).count
        return gathered_bytes(size, stride, dtype) + workspace(count, dtype, code.device, *options)

    return taken


def empty_code(x: Tensor, nbytes: int) -> Tensor:
    """The result of an encoding."""
    return x.new_empty((nbytes,), dtype=torch.uint8)


def _code_of_unknown_size(x: Tensor, most: int) -> Tensor:
    """A code whose size the data decides: unbacked if sizes may be, else the most that it can be."""
    nbytes: int | torch.SymInt = most
    with contextlib.suppress(RuntimeError):  # sizes are pinned, or this is the meta device
        nbytes = torch.library.get_ctx().new_dynamic_size(max=most)
    return x.new_empty((nbytes,), dtype=torch.uint8)


def fake_decoded(code: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *_: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=code.device)


def check_dtype(name: str, dtype: torch.dtype, accepted: Sequence[torch.dtype]) -> None:
    if dtype not in accepted:
        raise OptionError(f"encore::{name} takes {listed(accepted)}; got {dtype}: keep it as it is, or convert it")


def check_code(name: str, code: Tensor, least: int) -> None:
    """Raise `OptionError` for a code that is too short: it would be read beyond its end."""
    if code.dtype is not torch.uint8 or code.dim() != 1 or not code.is_contiguous():
        raise OptionError(f"encore::{name} reads one contiguous run of bytes, as its encoder made it; got "
                          f"{code.dtype}{list(code.shape)}")  # fmt: skip
    if code.numel() < least:
        raise OptionError(
            f"encore::{name} was given a code of {code.numel()} bytes where size and stride call for {least}: decode "
            "with the size and stride of the tensor that was encoded"
        )
