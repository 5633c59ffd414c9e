"""The null device, as tests set and read it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_process = ctypes.CDLL(None)
DEFAULTS = {"capacity": 12 << 30, "streams": 0, "copy_us": 0, "kernel_us": 0, "contents": 1}


def is_here() -> bool:
    """Whether this process has the null device."""
    return hasattr(_process, "nullcuda_set")


@dataclass(frozen=True, slots=True)
class Counts:
    """What a call did: kernels of PyTorch, cuBLAS and cuDNN, kernels of Triton, waits of the host, copies, calls of
    `cudaMalloc`, `cudaFree` and those that pin memory."""

    launches: int
    triton_launches: int
    syncs: int
    copies: int
    mallocs: int
    frees: int
    pinned: int


def counts() -> Counts:
    """What has been done so far."""
    read = _process.nullcuda_count
    read.restype = ctypes.c_long
    return Counts(*(read(name.encode()) for name in Counts.__slots__))


def counted(call: Callable[[], Any]) -> Counts:
    """What a call did."""
    before = counts()
    call()
    after = counts()
    return Counts(*(getattr(after, name) - getattr(before, name) for name in Counts.__slots__))


@contextlib.contextmanager
def device_with(**settings: int) -> Iterator[None]:
    """Set the capacity of each device in bytes; whether streams are threads, and how many microseconds copies and
    kernels take there; whether copies within a device are made."""
    assert settings.keys() <= DEFAULTS.keys()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _set(settings)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        _set({name: DEFAULTS[name] for name in settings})
        torch.cuda.empty_cache()


def _set(settings: dict[str, int]) -> None:
    for name, number in settings.items():
        _process.nullcuda_set(name.encode(), ctypes.c_long(number))


def late_fill(tensor: torch.Tensor, number: int, microseconds: int) -> None:
    """A kernel on the current stream that sets every byte of a dense tensor, after some time."""
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    _process.nullcuda_fill(
        ctypes.c_void_p(stream), ctypes.c_void_p(tensor.data_ptr()), number, ctypes.c_long(tensor.nbytes),
        ctypes.c_long(microseconds),
    )  # fmt: skip
