"""Operands of additive attention's scores, and the gradients of a function of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from encore.rnn import reference


def operands(
    batch: int, queries: int, keys: int, hidden: int, *, bias: bool = False, norm: str = "", dtype: Any = torch.float64
) -> list[Any]:
    """Everything that the operator takes, the eps of a LayerNorm last."""

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

    affine = [some(hidden), some(hidden)] if norm == "affine" else [None, None]
    tensors = [some(batch, queries, hidden), some(batch, keys, hidden), some(hidden)]
    return [*tensors, some(hidden) if bias else None, *affine, 1e-2 if norm else None]


def gradients(call: Any, given: list[Any], grad: Tensor) -> list[Tensor]:
    """The scores, and the gradients of all tensors."""
    found = call(*given)
    tensors = [tensor for tensor in given if isinstance(tensor, Tensor)]
    return [found.detach(), *torch.autograd.grad(found, tensors, grad)]


def by_formula(*given: Any) -> Tensor:
    return reference.additive_scores(given[-1], *given[:-1])[0]
