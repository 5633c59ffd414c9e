"""How an operator of the graph is called at run time.

The one file of this room that knows PyTorch's private doors (torch is pinned for their sake): an `OpOverload` is called
through the dispatcher's own callable, and a few operators need the state that eager would have given them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from encore.graph.random_ops import bernoulli_noise, dropout_noise

aten = torch.ops.aten


def callable_for(target: Any) -> Callable[..., Any]:
    """What to call for an operator."""
    if target in SPECIAL:
        return SPECIAL[target]
    return _dispatcher_call(target)


@functools.cache
def _dispatcher_call(target: Any) -> Callable[..., Any]:
    # OpOverload.__call__ only forwards to _op; thousands of small operators feel the extra Python frame.
    return target._op if isinstance(target, torch._ops.OpOverload) else target


def _with_grad_mode(target: Any) -> Callable[..., Any]:
    """oneDNN's recurrent layer asks the grad mode whether backward will want its workspace."""
    call = _dispatcher_call(target)

    def run(*args: Any) -> Any:
        with torch.enable_grad():
            return call(*args)

    run.__name__ = str(target).replace(".", "_")
    return run


SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.ops.encore.bernoulli_noise.default: bernoulli_noise,
    torch.ops.encore.dropout_noise.default: dropout_noise,
    aten.mkldnn_rnn_layer.default: _with_grad_mode(aten.mkldnn_rnn_layer.default),
}
