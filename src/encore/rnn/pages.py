"""Large pages for large buffers.

A buffer of tens of megabytes is fresh from the operating system at every call, and the first touch of each 4 KiB page
is a fault: on a virtual machine with Linux 6.18, 52 MB took 20 to 30 ms that way and 8 more to give back, where 2 MiB
pages took 7 to 13 and half of one to three. Where Linux gives large pages to those who ask (`madvise`), this asks. No
byte more is allocated: a large page never reaches beyond the buffer it was asked for.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LARGE = 4 << 20
"""Bytes from which asking pays: two large pages."""


def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """`like.new_empty(shape)`, on large pages where it is large."""
    return on_large_pages(like.new_empty(tuple(shape), dtype=dtype))


def on_large_pages(tensor: Tensor) -> Tensor:
    """The same tensor, which nobody has touched yet."""
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.nbytes >= LARGE:
        advise = _madvise()
        if advise is not None:
            begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            advise(begin, end - begin, mmap.MADV_HUGEPAGE)  # a refusal leaves small pages, which work as well
    return tensor


@functools.cache
def _madvise() -> Any:
    """The C library's function, or nothing where there are no such pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
