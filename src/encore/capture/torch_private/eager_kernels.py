"""Tracing what eager runs: `OpOverload.py_kernels` has Python decompositions that would replace the C++ kernels."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format

from encore.graph.random_ops import traced_dropout, traced_dropout_
from encore.graph.torch_private import FakeTensorMode

aten = torch.ops.aten


# Decompositions that only tracing sees: eager runs a C++ kernel instead, with other numbers, other memory or another
# speed. Operators missing here (batch norm, one_hot, ...) need theirs: their C++ form mutates or depends on data.
ONLY_IN_TRACING = (
    "dropout", "dropout_", "matmul", "lstm", "gru", "rnn_tanh", "rnn_relu", "softshrink", "hardshrink",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa", "multi_margin_loss", "multilabel_margin_loss_forward",
)  # fmt: skip


COMPOSITE_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


TRACED_KERNELS: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: traced_dropout,
    aten.dropout_.default: traced_dropout_,
}
"""Functions that tracing runs in place of the C++ kernels of some of these; `recurrent.py` adds its own."""


# Fake kernels that keep the strides of their input where the CPU kernels do not: operator -> position of the input.
# A view traced on the wrong strides fails at run time.
CONTIGUOUS_RESULTS = {aten._native_batch_norm_legit_functional.default: 0, aten.native_batch_norm_backward.default: 1}


_eager_lock = threading.RLock()


_eager_scopes = contextlib.ExitStack()


_eager_depth = 0


@contextlib.contextmanager
def eager_operators() -> Iterator[None]:
    """Trace what eager PyTorch runs: composite operators through their C++ kernels, results laid out as those do."""
    global _eager_depth
    with _eager_lock:
        _eager_depth += 1
        if _eager_depth == 1:
            _enter_eager_operators()
    try:
        yield
    finally:
        with _eager_lock:
            _eager_depth -= 1
            if _eager_depth == 0:
                _eager_scopes.close()


def _enter_eager_operators() -> None:
    _eager_scopes.callback(FakeTensorMode.cache_clear)
    for packet in ONLY_IN_TRACING:
        for overload in getattr(aten, packet).overloads():
            operator = getattr(getattr(aten, packet), overload)
            _eager_scopes.callback(operator._dispatch_cache.clear)
            for key in COMPOSITE_KEYS:
                _put(operator.py_kernels, key, TRACED_KERNELS.get(operator))
            operator._dispatch_cache.clear()
    for operator, position in CONTIGUOUS_RESULTS.items():
        _put(decomposition_table, operator, _with_contiguous_result(decomposition_table[operator], position))
    FakeTensorMode.cache_clear()


def _put(table: Any, key: Any, kernel: Callable[..., Any] | None) -> None:
    """Replace (or, with None, remove) a kernel until the scopes close."""
    before = table.pop(key, None)
    if kernel is not None:
        table[key] = kernel
    if before is not None:
        _eager_scopes.callback(table.__setitem__, key, before)
    else:
        _eager_scopes.callback(table.pop, key, None)


def _with_contiguous_result(fake: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A fake kernel whose first result is contiguous in the memory format of its input, as on CPU."""

    @functools.wraps(fake)  # fake tensors look at a kernel's module and name before they trust it
    def run(*args: Any, **kwargs: Any) -> Any:
        first, *others = fake(*args, **kwargs)
        source = args[position]
        if first is not None and source.device.type == "cpu":
            first = torch.empty_like(first, memory_format=suggest_memory_format(source))
        return (first, *others)

    return run


def composite(operator: Any) -> Callable[..., Any]:
    """The C++ kernel of a composite operator, whatever Python kernel replaces it."""
    return functools.partial(operator._op_dk, DispatchKey.CompositeImplicitAutograd)
