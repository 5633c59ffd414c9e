"""How an operator of the graph is called at run time.

The one file of this room that knows PyTorch's private doors (torch is pinned for their sake): an `OpOverload` is called
through the dispatcher's own callable, and a few operators need the state that eager would have given them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from encore.graph.random_ops import DrawAgain, DrawState, bernoulli_noise, dropout_mask, dropout_noise

aten = torch.ops.aten


def callable_for(target: Any) -> Callable[..., Any]:
    """What to call for an operator."""
    if isinstance(target, DrawState):
        return _generator(target.device, target.generator).get_state
    if isinstance(target, DrawAgain):
        return _draw_again(target)
    if target in SPECIAL:
        return SPECIAL[target]
    return _dispatcher_call(target)


@functools.cache
def _dispatcher_call(target: Any) -> Callable[..., Any]:
    # OpOverload.__call__ only forwards to _op; thousands of small operators feel the extra Python frame.
    return target._op if isinstance(target, torch._ops.OpOverload) else target


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
    """oneDNN's recurrent layer asks the grad mode whether backward will want its workspace; autograd itself must not
    look, or its node would hold that workspace for as long as the outputs live."""
    call = _dispatcher_call(target)

    def run(*args: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return call(*args)

    run.__name__ = str(target).replace(".", "_")
    return run


SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.ops.encore.bernoulli_noise.default: bernoulli_noise,
    torch.ops.encore.dropout_mask.default: dropout_mask,
    torch.ops.encore.dropout_noise.default: dropout_noise,
    aten.mkldnn_rnn_layer.default: _with_grad_mode(aten.mkldnn_rnn_layer.default),
}
