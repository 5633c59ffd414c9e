"""How an operator of the graph is called at run time: through the dispatcher's own callable, and a few operators with
the state that eager gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from encore.devices import default_generator
from encore.graph.random_ops import DrawAgain, DrawState, bernoulli_noise, dropout_mask, dropout_noise
from encore.lower.torch_private import below_autograd, dispatcher_call, takes_cudnn_batch_norm

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
    return default_generator(device) if named is None else named


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


def _batch_norm(target: Any, statistics: int, train: bool | None, copies: bool = False) -> Callable[..., Any]:
    """Normalisation by the batch as eager runs it: by cuDNN where PyTorch takes that, since its bits are others.
    `statistics` counts the arguments of running statistics, which cuDNN updates in place."""
    call = dispatcher_call(target)

    def run(x: Any, weight: Any, bias: Any, *others: Any) -> Any:
        before: tuple[Any, Any] = others[:2] if statistics else (None, None)  # type: ignore[assignment]
        *flag, momentum, eps = others[statistics:]
        training = bool(flag[0]) if train is None else train
        if not takes_cudnn_batch_norm(x, weight, bias, *before, training, eps):
            return call(x, weight, bias, *others)
        running = [one.clone() if copies and one is not None else one for one in before]
        output, mean, scale, _ = aten.cudnn_batch_norm.default(x, weight, bias, *running, training, momentum, eps)
        return (output, mean, scale, *running) if copies else (output, mean, scale)

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


def _batch_norm_backward(grad: Any, x: Any, weight: Any, *others: Any) -> Any:
    mean, variance, saved_mean, saved_scale, train, eps, wanted = others
    if not train or not takes_cudnn_batch_norm(x, weight, weight, mean, variance, train, eps):
        call = dispatcher_call(aten.native_batch_norm_backward.default)
        return call(grad, x, weight, *others)
    reserve = x.new_empty(0, dtype=torch.uint8)
    found = aten.cudnn_batch_norm_backward.default(
        x, grad.contiguous(), weight, mean, variance, saved_mean, saved_scale, eps, reserve
    )
    return tuple(one if want else None for one, want in zip(found, wanted, strict=True))


SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.ops.encore.bernoulli_noise.default: bernoulli_noise,
    torch.ops.encore.dropout_mask.default: dropout_mask,
    torch.ops.encore.dropout_noise.default: dropout_noise,
    aten._native_batch_norm_legit_functional.default: _batch_norm(
        aten._native_batch_norm_legit_functional.default, 2, None, copies=True
    ),
    aten._native_batch_norm_legit.no_stats: _batch_norm(aten._native_batch_norm_legit.no_stats, 0, None),
    aten._native_batch_norm_legit_no_training.default: _batch_norm(
        aten._native_batch_norm_legit_no_training.default, 2, False
    ),
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._assert_async.default: _assert_true(aten._assert_async.default),
    aten._assert_async.msg: _assert_true(aten._assert_async.msg),
    aten.mkldnn_rnn_layer.default: _with_grad_mode(aten.mkldnn_rnn_layer.default),
}
