"""The shapes of recurrent layers, for Dynamo: PyTorch's Python decompositions of them run every time step on fake
tensors, which takes seconds for hundreds of steps, and Dynamo asks for nothing but the shapes of the results."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from encore.capture.torch_private.eager_kernels import COMPOSITE_KEYS, aten
from encore.graph.torch_private import FakeTensor

OPERATORS = tuple(kind.input for kind in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu))

_lock = threading.Lock()
_users = 0
_inside = threading.local()


@contextlib.contextmanager
def recurrent_shapes() -> Iterator[None]:
    """What Dynamo captures inside, in this thread, gets the shapes of recurrent layers without running them."""
    before, _inside.wanted = getattr(_inside, "wanted", False), True
    _enter()
    try:
        yield
    finally:
        _inside.wanted = before
        _leave()


def _enter() -> None:
    global _users
    with _lock:
        _users += 1
        for operator in OPERATORS:
            for key in COMPOSITE_KEYS:
                known = operator.py_kernels.get(key)
                if known is not None and not isinstance(known, _Shapes):
                    operator.py_kernels[key] = _Shapes(known)
                    operator._dispatch_cache.clear()


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        for operator in OPERATORS if not _users else ():
            for key in COMPOSITE_KEYS:
                known = operator.py_kernels.get(key)
                if isinstance(known, _Shapes):
                    operator.py_kernels[key] = known.others
                    operator._dispatch_cache.clear()


class _Shapes:
    """A Python kernel for what is wanted; any other call goes to the `others`."""

    def __init__(self, others: Callable[..., Any]) -> None:
        self.others = others
        functools.update_wrapper(self, others, updated=())

    def __call__(self, x: Tensor, hx: Any, params: Sequence[Tensor], *rest: Any) -> Any:
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        if not getattr(_inside, "wanted", False) or not _is_usual([x, *states, *params]):
            return self.others(x, hx, params, *rest)
        _, _, _, _, bidirectional, batch_first = rest
        steps, rows = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
        output = x.new_empty(steps, rows, states[0].shape[2] * (2 if bidirectional else 1))
        made = [output.transpose(0, 1) if batch_first else output, *map(torch.empty_like, states)]
        asked = [one.sum() for one in (x, *states, *params) if one.requires_grad]
        return tuple(one + sum(asked) for one in made) if asked and torch.is_grad_enabled() else tuple(made)


def _is_usual(tensors: Sequence[Tensor]) -> bool:
    """Return whether these are fake tensors of one type, three-dimensional where layers want that."""
    return (
        all(isinstance(one, FakeTensor) for one in tensors)
        and len({one.dtype for one in tensors}) == 1
        and tensors[0].dim() == 3
        and not torch.is_autocast_enabled("cpu")
    )
