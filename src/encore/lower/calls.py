"""How an operator of the graph is called at run time: through the dispatcher's own callable, and a few operators with
the state that eager gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from encore.graph.random_ops import DrawAgain, DrawState, bernoulli_noise, dropout_mask, dropout_noise
from encore.lower.torch_private import below_autograd, dispatcher_call

aten = torch.ops.aten


def callable_for(target: Any) -> Callable[..., Any]:
    """The callable for an operator."""
    if isinstance(target, DrawState):
        return _generator(target.device, target.generator).get_state
    if isinstance(target, DrawAgain):
        return _draw_again(target)
    if target in SPECIAL:
        return SPECIAL[target]
    return dispatcher_call(target)


def _generator(device: str, named: torch.Generator | None = None) -> torch.Generator:
    if named is not None:
        return named
    if device.startswith("cuda"):
        torch.cuda.init()
        return torch.cuda.default_generators[torch.device(device).index or 0]
    return torch.default_generator


def _draw_again(again: DrawAgain) -> Callable[..., Any]:
    call = callable_for(again.target)

    def run(state: torch.Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        drawing = _generator(again.device, generator)
        found = drawing.get_state()
        drawing.set_state(state)
        try:
            return call(*args, **kwargs) if generator is None else call(*args, generator=generator, **kwargs)
        finally:
            drawing.set_state(found)

    run.__name__ = f"{again.target}_again".replace(".", "_")
    return run


def _with_grad_mode(target: Any) -> Callable[..., Any]:
    """oneDNN's recurrent layer returns the workspace for backward only if grad mode is enabled; autograd itself must
    not record it, or its node would keep that workspace for as long as the outputs live."""
    call = dispatcher_call(target)

    def run(*args: Any) -> Any:
        with torch.enable_grad(), below_autograd():
            return call(*args)

    run.__name__ = str(target).replace(".", "_")
    return run


def _assert_true(target: Any) -> Callable[..., Any]:
    """An `assert` of the user's on a tensor: an `AssertionError`, where the operator raises a `RuntimeError`."""
    call = dispatcher_call(target)

    def run(condition: torch.Tensor, message: str = "") -> None:
        if condition.device.type == "cpu" and not condition:
            raise AssertionError(message)
        call(condition, *([message] if target is aten._assert_async.msg else []))

    run.__name__ = str(target).replace(".", "_")
    return run


SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.ops.encore.bernoulli_noise.default: bernoulli_noise,
    torch.ops.encore.dropout_mask.default: dropout_mask,
    torch.ops.encore.dropout_noise.default: dropout_noise,
    aten._assert_async.default: _assert_true(aten._assert_async.default),
    aten._assert_async.msg: _assert_true(aten._assert_async.msg),
    aten.mkldnn_rnn_layer.default: _with_grad_mode(aten.mkldnn_rnn_layer.default),
}
