"""Compiled steps on the null device, measured by PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import encore
from nullcuda.null_device import Counts, counted


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a compiled model, after two others."""

    predicted: int
    measured: int
    """The most bytes allocated at once, above those before the step."""
    counts: Counts
    report: Any


class Scored(nn.Module):
    """A model with a loss at its end: the sum of its first result, if that is no loss already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> torch.Tensor:
        return as_loss(self.model(*inputs))


def as_loss(result: Any) -> torch.Tensor:
    first = result[0] if isinstance(result, tuple) else result
    return first if first.dim() == 0 else first.sum()


def allocated_peak(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def compiled_step(model: nn.Module, inputs: Sequence[Any], **options: Any) -> Step:
    """The third step of a model, which is compiled with these options, on the device where it is."""
    model = Scored(model)
    device = next(model.parameters()).device

    def run() -> None:
        model(*inputs).backward()

    encore.compile(model, **options)
    for _ in range(2):
        run()
        model.zero_grad()
    measured = allocated_peak(run, device)
    model.zero_grad()
    report = encore.report(model)
    return Step(report.planned.step_peak, measured, counted(run), report)
