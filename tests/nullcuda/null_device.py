"""The null device, as tests set and read it, and the order of what is done on it (`order.cpp`)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_process = ctypes.CDLL(None)
DEFAULTS = {"capacity": 12 << 30, "streams": 0, "copy_us": 0, "kernel_us": 0, "random": 0, "contents": 1, "products": 0}


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
    """Set the capacity of each device in bytes; whether streams are threads; how many microseconds copies and kernels
    take, by the device's clock and on threads; whether they take a random part of that on threads; whether copies
    within a device are made, and whether products of float32 matrices are computed."""
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
    with torch.accelerator.device_index(tensor.device.index):
        _process.nullcuda_fill(*_memory(tensor), number, ctypes.c_long(tensor.nbytes), ctypes.c_long(microseconds))


class Reader:
    """Kernels that read."""

    def __init__(self) -> None:
        self._others = ctypes.c_long(0)

    def expect(self, tensor: torch.Tensor, number: int, microseconds: int) -> None:
        """A kernel on the current stream that compares every byte of a dense tensor, after some time."""
        others, size, time = ctypes.byref(self._others), ctypes.c_long(tensor.nbytes), ctypes.c_long(microseconds)
        with torch.accelerator.device_index(tensor.device.index):
            _process.nullcuda_expect(*_memory(tensor), number, size, time, others)

    @property
    def others(self) -> int:
        """Bytes that had another value than expected, so far."""
        torch.cuda.synchronize()
        return self._others.value


def _memory(tensor: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    return ctypes.c_void_p(stream), ctypes.c_void_p(tensor.data_ptr())


class Watch:
    """What is seen of the order of work."""

    @property
    def races(self) -> list[str]:
        """Accesses to the same bytes, one of which writes, neither of which is behind the other."""
        read = _process.nullcuda_race
        read.restype = ctypes.c_char_p
        return [read(ctypes.c_long(number)).decode() for number in range(_process.nullcuda_races())]

    @property
    def microseconds(self) -> float:
        """The time by the device's clock when everything is done that was given to it so far."""
        read = _process.nullcuda_clock
        read.restype = ctypes.c_double
        return float(read())


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watch the order of work, from nothing: the clock begins at 0."""
    torch.cuda.synchronize()
    _process.nullcuda_watch(1)
    try:
        yield Watch()
    finally:
        _process.nullcuda_watch(0)


def note_kernel(tensor: torch.Tensor, *, writes: bool, what: str) -> None:
    """Note an access of a kernel to a tensor, and to what lies between its elements, on the current stream."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = ctypes.c_long(span * tensor.element_size() if tensor.numel() else 0)
    with torch.accelerator.device_index(tensor.device.index):
        _process.nullcuda_access(*_memory(tensor), size, writes, what.encode())


def note_host(address: int, size: int, *, writes: bool, what: str) -> None:
    """Note an access of this thread to pinned memory."""
    here = ctypes.c_void_p(-1)
    _process.nullcuda_access(here, ctypes.c_void_p(address), ctypes.c_long(size), writes, what.encode())


def set_thread_apart() -> None:
    """From now on and until the watch ends, what this thread does is not behind what others do, except by `release` and
    `acquire`, and by waits for the device."""
    _process.nullcuda_set_apart()


def release(key: int) -> None:
    """Whoever acquires this key next is behind what this thread has seen."""
    _process.nullcuda_release(ctypes.c_void_p(key))


def acquire(key: int) -> None:
    """What this thread does next is behind what the last one had seen that released this key."""
    _process.nullcuda_acquire(ctypes.c_void_p(key))
