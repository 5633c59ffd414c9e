"""Small models from plain data: a list of layer descriptions, each applied to a tensor of shape [batch, steps, width].

What hypothesis prints for a failure is the list itself: `RandomModel(layers, width)` builds the model again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

Layer = tuple[Any, ...]

LARGEST_WIDTH = 16

MODEL_LAYERS: st.SearchStrategy[Layer] = st.one_of(
    st.tuples(st.just("linear"), st.sampled_from([2, 3, 8])),
    st.tuples(st.just("conv1d"), st.sampled_from([2, 5])),
    st.tuples(st.sampled_from(["layer_norm", "batch_norm", "shared", "residual", "concat"])),
    st.tuples(st.sampled_from(["transpose", "reshape", "chunk", "slice", "expand", "stack_of_views"])),
    st.tuples(st.sampled_from(["relu_", "add_", "mul_", "slice_mul_", "half_relu_", "add_self_"])),
    st.tuples(st.sampled_from(["relu", "tanh", "sigmoid", "gelu", "softmax", "log_softmax", "avg_pool", "max_pool"])),
    st.tuples(st.just("dropout"), st.sampled_from([0.1, 0.5])),
    st.tuples(st.sampled_from(["emit", "emit_view", "emit_mean", "emit_transposed"])),
)


class RandomModel(nn.Module):
    """Applies the described layers in order; returns the last value and whatever was emitted on the way."""

    def __init__(self, layers: Sequence[Layer], width: int, steps: int) -> None:
        super().__init__()
        self.described = tuple(layers)
        self.parts = nn.ModuleList()
        self.tied = nn.Linear(4, 4)
        for layer in layers:
            part: nn.Module = nn.Identity()
            match layer:
                case ("linear", out):
                    part, width = nn.Linear(width, out), out
                case ("conv1d", out):
                    part, width = nn.Conv1d(width, out, 3, padding=1), out
                case ("layer_norm",):
                    part = nn.LayerNorm(width)
                case ("batch_norm",):
                    part = nn.BatchNorm1d(width)
                case ("dropout", share):
                    part = nn.Dropout(share)
                case ("residual",):
                    part = nn.Linear(width, width)
                case ("concat",) if 2 * width <= LARGEST_WIDTH:
                    part, width = nn.Linear(width, width), 2 * width
                case ("shared",):
                    part, width = nn.Linear(width, 4), 4
                case ("transpose",) | ("reshape",) if steps <= LARGEST_WIDTH:
                    width, steps = steps, width
                case ("chunk",):
                    width = width // 2 if width % 2 == 0 else width
                case ("slice",):
                    steps = max(1, steps - 1)
                case ("avg_pool",) | ("max_pool",):
                    steps = steps // 2 if steps > 1 else steps
            self.parts.append(part)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: list[torch.Tensor] = []
        for layer, part in zip(self.described, self.parts, strict=True):
            x = self._apply(layer[0], part, x, outputs)
        return self.head(x), *outputs

    def _apply(self, name: str, part: nn.Module, x: torch.Tensor, outputs: list[torch.Tensor]) -> torch.Tensor:
        batch, steps, width = x.shape
        match name:
            case "linear" | "layer_norm" | "dropout":
                return part(x)
            case "conv1d" | "batch_norm":
                return part(x.transpose(1, 2)).transpose(1, 2)
            case "residual":
                return x + part(x)
            case "concat":
                return torch.cat([x, part(x)], dim=-1) if isinstance(part, nn.Linear) else x
            case "shared":
                return self.tied(torch.tanh(self.tied(part(x))))
            case "transpose":
                return x.transpose(1, 2) if steps <= LARGEST_WIDTH else x
            case "reshape":
                return x.reshape(batch, width, steps) if steps <= LARGEST_WIDTH else x
            case "chunk" if width % 2 == 0:
                first, second = x.chunk(2, dim=-1)
                return first * second.sigmoid()
            case "slice" if steps > 1:
                return x[:, 1:]
            case "expand":
                return x + x.mean(dim=1, keepdim=True).expand_as(x)
            case "stack_of_views":
                return torch.stack([x[:, step] for step in range(steps)], dim=1)
            case "relu_":
                return (x + 0.5).relu_()
            case "add_":
                return (x * 2).add_(1.0)
            case "add_self_":
                return (x * 2).add_(x)
            case "mul_":
                return (x - 0.25).mul_(0.5)
            case "slice_mul_":
                fresh = x + 1
                fresh[:, 0].mul_(2)
                return fresh
            case "half_relu_" if width % 2 == 0:
                fresh = x - 0.1
                fresh[..., : width // 2].relu_()
                return fresh
            case "relu" | "tanh" | "sigmoid":
                return getattr(torch, name)(x)
            case "gelu":
                return F.gelu(x)
            case "softmax" | "log_softmax":
                return getattr(torch, name)(x, dim=-1)
            case "avg_pool" if steps > 1:
                return F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
            case "max_pool" if steps > 1:
                return F.max_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
            case "emit":
                outputs.append(x * 1.5)
            case "emit_view":
                outputs.append(x[:, :1])
            case "emit_mean":
                outputs.append(x.mean())
            case "emit_transposed":
                outputs.append((x + 1).transpose(1, 2))
        return x
