"""Registration of a recurrent operator with PyTorch and with the prediction of memory.

The layers of a small network take less time than PyTorch's general way to give an operator in Python a derivative
(`torch.library.register_autograd`), which costs a fifth of a millisecond a call. So the derivative is a kernel of the
dispatcher here, and below it the operator's own function is called directly if no other dispatch key is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from encore.rnn.torch_private import (
    BelowAutograd,
    any_requires_grad,
    below_autograd,
    dynamo_is_active,
    is_plain,
    untraced,
)

_library = torch.library.Library("encore", "FRAGMENT")

WORKSPACES: dict[Any, Callable[..., int]] = {}
"""Operator -> bytes of a call's workspace, from its own arguments, which may be fake tensors."""

MADE_UP: dict[Any, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {}
"""Operator -> its arguments with valid numbers, from arbitrary ones, if not every number is valid."""


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], workspace: Callable[..., int] | None,
    differentiate: Callable[..., Any], save: Callable[..., None],
) -> None:  # fmt: skip
    """Define `encore::<name>` with its kernel for every device, its shapes, its workspace (measured if None) and its
    derivative."""
    name = schema.partition("(")[0]
    _library.define(schema)
    operator = getattr(torch.ops.encore, name).default
    kernel = untraced_kernel(run)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"encore::{name}", fake, lib=_library)
    _library.impl(name, _differentiable(operator, kernel, differentiate, save), "Autograd", with_keyset=True)
    if workspace is not None:
        WORKSPACES[operator] = workspace


def untraced_kernel(run: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which Dynamo would trace into when a compiled graph calls it."""
    disabled = untraced(run)

    def kernel(*args: Any) -> Any:
        return (disabled if dynamo_is_active() else run)(*args)

    return kernel


def _differentiable(
    operator: Any, kernel: Callable[..., Any], differentiate: Callable[..., Any], save: Callable[..., None]
) -> Callable[..., Any]:
    """The operator's kernel for autograd: `save(ctx, inputs, output)`, then `differentiate(ctx, *gradients)`."""

    def below(keys: Any, args: tuple[Any, ...]) -> Any:
        left = below_autograd(keys)
        with BelowAutograd():
            return kernel(*args) if is_plain(left) else operator.redispatch(left, *args)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *args, keys = given
            result = below(keys, tuple(args))
            save(ctx, tuple(args), result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (*differentiate(ctx, *grads), None)

    Derivative.__name__ = Derivative.__qualname__ = f"Backward of {operator}"

    def autograd(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(args):
            return Derivative.apply(*args, keys)
        return below(keys, args)

    return autograd
