"""How a recurrent operator becomes known to PyTorch, and to whoever predicts memory.

The layers of a small network take less time than PyTorch's general way to give an operator in Python a derivative
(`torch.library.register_autograd`), which costs a fifth of a millisecond a call. So the derivative is a kernel of the
dispatcher's here, and beneath it the operator's own function is called at once where nothing else waits in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._C._dynamo.eval_frame import get_eval_frame_callback

_library = torch.library.Library("encore", "FRAGMENT")

WORKSPACES: dict[Any, Callable[..., int]] = {}
"""Operator -> bytes that a call takes aside and gives back, from its own arguments: fake tensors will do."""

MADE_UP: dict[Any, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {}
"""Operator -> its arguments with numbers that mean something, from made-up ones, where not any number will do."""


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], workspace: Callable[..., int] | None,
    differentiate: Callable[..., Any], save: Callable[..., None],
) -> None:  # fmt: skip
    """Define `encore::<name>` with its kernel for every device, its shapes, its workspace (None: it is
    measured) and its derivative."""
    name = schema.partition("(")[0]
    _library.define(schema)
    operator = getattr(torch.ops.encore, name).default
    kernel = _untraced(run)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"encore::{name}", fake, lib=_library)
    _library.impl(name, _differentiable(operator, kernel, differentiate, save), "Autograd", with_keyset=True)
    if workspace is not None:
        WORKSPACES[operator] = workspace


def _untraced(run: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo would trace into the kernel where a compiled graph calls it; the rest of the time it is not asked."""
    disabled = torch.compiler.disable(run)

    def kernel(*args: Any) -> Any:
        return (disabled if get_eval_frame_callback() else run)(*args)

    return kernel


def _differentiable(
    operator: Any, kernel: Callable[..., Any], differentiate: Callable[..., Any], save: Callable[..., None]
) -> Callable[..., Any]:
    """The operator's kernel for autograd: `save(ctx, inputs, output)`, then `differentiate(ctx, *gradients)`."""
    plain = (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)

    def beneath(keys: Any, args: tuple[Any, ...]) -> Any:
        left = keys & _C._after_autograd_keyset
        with _C._AutoDispatchBelowAutograd():
            return kernel(*args) if left.highestPriorityTypeId() in plain else operator.redispatch(left, *args)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *args, keys = given
            result = beneath(keys, tuple(args))
            save(ctx, tuple(args), result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (*differentiate(ctx, *grads), None)

    Derivative.__name__ = Derivative.__qualname__ = f"Backward of {operator}"

    def autograd(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return Derivative.apply(*args, keys)
        return beneath(keys, args)

    return autograd
