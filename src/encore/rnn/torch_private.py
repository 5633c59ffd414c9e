"""Every private interface of PyTorch that the recurrent operators use.

What is relied upon: the dispatcher's keys and guards, which give an operator in Python a derivative without the cost of
`torch.library.register_autograd`; Dynamo's callback, which says whether Dynamo is active; the functions of ATen that
`torch.nn`'s recurrent modules and packed sequences call; how to leave the modes of tracing;
`torch.compiler.disable` without importing Dynamo before the first call (`untraced`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import _C, Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo as untraced
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "BelowAutograd", "any_requires_grad", "below_autograd", "check_packed_lengths", "dynamo_is_active", "has_no_data",
    "is_plain", "layer_function", "pytree", "recording_autograd", "untraced", "without_modes",
]  # fmt: skip

BelowAutograd = _C._AutoDispatchBelowAutograd
"""A context in which operators record nothing for autograd."""
_WITH_KERNEL = (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)


def dynamo_is_active() -> bool:
    return get_eval_frame_callback() is not None


def any_requires_grad(args: tuple[Any, ...]) -> bool:
    return _C._any_requires_grad(*args)


def below_autograd(keys: Any) -> Any:
    """The dispatch keys that are left below autograd."""
    return keys & _C._after_autograd_keyset


def is_plain(keys: Any) -> bool:
    """Return whether nothing but a device's kernel is left to run."""
    return keys.highestPriorityTypeId() in _WITH_KERNEL


def recording_autograd() -> Any:
    """A context in which operators record what autograd needs, inside a kernel that runs below autograd."""
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in (_C.DispatchKey.AutogradOther, _C.DispatchKey.AutogradFunctionality):
        excluded = excluded.remove(key)
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context in which operators run on real tensors, whatever is being traced."""
    with _disable_current_modes(), _C._DisablePythonDispatcher(), _C._DisableAutocast():
        yield


def layer_function(name: str) -> Any:
    """The function that a recurrent module of `torch.nn` calls: "lstm", "gru", "rnn_tanh" or "rnn_relu"."""
    return getattr(torch._VF, name)


def check_packed_lengths(lengths: Tensor, steps: int) -> None:
    """Raise what PyTorch raises for lengths that `pack_padded_sequence` rejects."""
    torch._pack_padded_sequence(torch.zeros(1).expand(steps, lengths.shape[0]), lengths, False)


def has_no_data(tensor: Tensor) -> bool:
    """Return whether only the shape of a tensor is known."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)
