"""Launching a kernel where its operands are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a grid of programs. Triton launches on the current GPU, which need not be the one that the tensors are on."""
    operand = next(argument for argument in arguments if isinstance(argument, Tensor))
    with torch.accelerator.device_index(operand.device.index if operand.is_cuda else None):
        kernel[grid](*arguments, **constants)
