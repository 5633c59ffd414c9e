"""What additive attention's two operators take, and what computes them: a Protocol with three implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from encore.errors import OptionError
from encore.rnn.layer import TYPES, WIDE

ScoreGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of keys, query, weight, bias, norm_weight and norm_bias."""


@dataclass(frozen=True, slots=True)
class ScoreOperands:
    """What both operators take, checked."""

    query: Tensor
    keys: Tensor
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float | None
    """Of the LayerNorm, if there is one."""

    def __post_init__(self) -> None:
        query, keys = self.query, self.keys
        if query.dim() != 3 or keys.dim() != 3:
            shapes = f"{tuple(query.shape)} and {tuple(keys.shape)}"
            raise OptionError(f"additive scores take a query [B, Tq, H] and keys [B, Tk, H]; got {shapes}")
        if query.shape[0] != keys.shape[0] or query.shape[2] != keys.shape[2]:
            shapes = f"{tuple(query.shape)} and {tuple(keys.shape)}"
            raise OptionError(f"query and keys must agree in batch and hidden size; got {shapes}")
        if query.dtype not in TYPES:
            known = ", ".join(map(str, TYPES))
            raise OptionError(f"additive scores are computed in {known}; got {query.dtype}: convert the query")
        if self.eps is None and (self.norm_weight is not None or self.norm_bias is not None):
            raise OptionError("norm_weight and norm_bias belong to a LayerNorm: give its eps, too")
        for name in ("keys", "weight", "bias", "norm_weight", "norm_bias"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if name != "keys" and tensor.shape != query.shape[2:]:
                raise OptionError(f"{name} must have the shape ({query.shape[2]},); got {tuple(tensor.shape)}")
            if tensor.dtype != query.dtype or tensor.device != query.device:
                raise OptionError(
                    f"{name} is {tensor.dtype} on {tensor.device}, the query {query.dtype} on {query.device}: "
                    "convert one of them"
                )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the scores."""
        return self.query.shape[0], self.query.shape[1], self.keys.shape[1]

    @property
    def hidden(self) -> int:
        return self.query.shape[2]

    @property
    def real(self) -> torch.dtype:
        """The type that is computed in."""
        return WIDE.get(self.query.dtype, self.query.dtype)

    @property
    def middle(self) -> int:
        """Numbers between operands and scores, which are never in memory at once."""
        batch, queries, keys = self.shape
        return batch * queries * keys * self.hidden


class ScoreKernels(Protocol):
    """What computes scores and their gradients; the modules `scores_native`, `scores_plain` and `scores_gpu`."""

    def forward_bytes(self, operands: ScoreOperands) -> int:
        """A bound on the workspace of `forward`."""

    def backward_bytes(self, operands: ScoreOperands) -> int:
        """A bound on the workspace of `backward`."""

    def forward(self, operands: ScoreOperands, scores: Tensor) -> None:
        """Fill `scores`, which are contiguous."""

    def backward(self, operands: ScoreOperands, grad: Tensor, results: ScoreGradients, add_keys: bool) -> None:
        """Fill `results`, of which those that are not needed are empty; `add_keys` adds to the first one's contents."""
