"""The private API of PyTorch that devices use: the functions behind `torch.nn`'s dropout and recurrent modules, how
cuBLAS's workspaces are freed, and the history of accelerators' allocators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import _VF
from torch.nn import functional as F

RECURRENT = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Gates of each kind of recurrent layer."""


def dropout_functions() -> frozenset[Any]:
    """The functions by which dropout is called."""
    return frozenset({F.dropout, torch.dropout, _VF.dropout})


def recurrent_functions() -> dict[Any, str]:
    """The kind of layer, by the functions that it is called by."""
    return {getattr(place, kind): kind for kind in RECURRENT for place in (torch, _VF)}


def free_product_workspaces() -> None:
    """Free the workspaces that PyTorch keeps for cuBLAS; the next product of a thread allocates its own again."""
    torch._C._cuda_clearCublasWorkspaces()


@dataclass(slots=True)
class AllocatorHistory:
    """What an accelerator's allocator was asked for, in order: what was done, bytes, address."""

    events: list[tuple[str, int, int]] = field(default_factory=list)
    known: bool = False
    """Whether it was recorded: not while the user records it."""


MOST_EVENTS = 100_000


@contextlib.contextmanager
def allocator_history(device: torch.device) -> Iterator[AllocatorHistory]:
    """Record what is asked of a device's allocator; the history is complete at the end."""
    found = AllocatorHistory()
    if torch._C._cuda_isHistoryEnabled():
        yield found
        return
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
    try:
        yield found
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        traces = torch.cuda.memory._snapshot()["device_traces"][index]
        found.events += [(one["action"], one["size"], one["addr"]) for one in traces]
        found.known = len(found.events) < MOST_EVENTS
    finally:
        torch.cuda.memory._record_memory_history(None)
