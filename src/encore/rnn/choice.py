"""Which of three implementations runs: C++, Triton, or PyTorch's own operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from encore.kernels import BuildError
from encore.kernels.gpu import has_gpu_kernels

Kernels = TypeVar("Kernels")


def chosen_kernels(
    device: torch.device, cpu: Callable[[], Kernels], gpu: Callable[[], Kernels], plain: Kernels, work: str
) -> Kernels:
    """The kernels of a device; `work` is what they do, for a warning if Triton is missing on a GPU."""
    if device.type == "cpu":
        return cpu()
    return gpu() if has_gpu_kernels(device, f"{work} in PyTorch's own operators") else plain


def compiled_kernels(build: Callable[[], object], compiled: Kernels, plain: Kernels, work: str) -> Kernels:
    """The compiled kernels if `build` succeeds, else the plain ones, with a warning."""
    try:
        build()
    except BuildError as error:
        warnings.warn(
            f"encore: {work} in PyTorch's own operators, slower than possible: {error}. "
            "Install a C++ compiler, or set CXX to one",
            stacklevel=2,
        )
        return plain
    return compiled
