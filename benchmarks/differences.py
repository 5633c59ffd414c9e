"""The largest absolute difference of gradients: 0.0 means every bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def largest_difference(ones: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> float:
    """The largest difference of any two elements; infinite where one is a NaN or only one side has a tensor."""
    return max((_distance(one, other) for one, other in zip(ones, others, strict=True)), default=0.0)


def gradient_difference(expected: nn.Module, found: nn.Module) -> float:
    """The largest difference of the gradients of two modules."""
    ones, others = ([parameter.grad for parameter in model.parameters()] for model in (expected, found))
    return largest_difference(ones, others)


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return float((one - other).abs().nan_to_num(nan=float("inf")).max())
