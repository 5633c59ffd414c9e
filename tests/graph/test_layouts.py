"""What the graph says about a result (shape, strides, type) against what the operator really returns.

Everything rests on it: views are taken as the graph's strides allow, memory is counted by its shapes. Fake kernels do
not always tell the truth, so every operator of a step is listened to while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from encore.api import compiled_call
from encore.graph import Value
from encore.lower import codegen
from encore.lower.calls import callable_for
from encore.schedule import Run
from support.captured_graphs import train_step

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype | None]


def layout(tensor: torch.Tensor | Value) -> Layout:
    """Shape, strides where they matter, type."""
    shape = tuple(tensor.shape)
    stride = tensor.stride() if isinstance(tensor, torch.Tensor) else tensor.stride
    return shape, tuple(step for size, step in zip(shape, stride, strict=True) if size > 1), tensor.dtype


def misdescribed(model: nn.Module, *args: Any) -> list[str]:
    """Results of a step that are laid out otherwise than the graph says."""
    returned: list[tuple[Any, ...]] = []

    def listening(target: Any) -> Callable[..., Any]:
        call = callable_for(target)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            results = result if isinstance(result, tuple | list) else (result,)
            returned.append(tuple(layout(item) if isinstance(item, torch.Tensor) else None for item in results))
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codegen, "callable_for", listening)
        compiled = encore.compile(model, lowering="eager")
        train_step(compiled, *args)
    (captured,) = compiled_call(compiled).session.last_step
    schedule = captured.plan.schedule
    graph = schedule.graph
    runs = [action for action in (*schedule.forward, *schedule.backward) if isinstance(action, Run)]
    return [
        f"{graph.ops[action.op].name}: {real}, not {layout(graph.values[value])}"
        for action, results in zip(runs, returned, strict=True)
        for value, real in zip(graph.ops[action.op].writes, results, strict=True)
        if value is not None and real is not None and real != layout(graph.values[value])
    ]


class Applied(nn.Module):
    """A linear layer over the channels of `[batch, time, channel]`, and something applied to its result."""

    def __init__(self, apply: Callable[[torch.Tensor], torch.Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layer = layer
        self.apply_to = apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.apply_to(self.enter(x))
        return x if self.layer is None else self.layer(x)


def swapped(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def as_image(x: torch.Tensor) -> torch.Tensor:
    """Channels last in memory."""
    return x.unflatten(1, (2, 3)).permute(0, 3, 1, 2)


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module | None]] = {
    "layer_norm": (swapped, nn.LayerNorm(6)),
    "group_norm": (lambda x: x, nn.GroupNorm(2, 6)),
    "group_norm_transposed": (swapped, nn.GroupNorm(2, 8)),
    "batch_norm": (lambda x: x, nn.BatchNorm1d(6)),
    "batch_norm_transposed": (swapped, nn.BatchNorm1d(8)),
    "batch_norm_channels_last": (as_image, nn.BatchNorm2d(8)),
    "batch_norm_of_rows": (lambda x: x.flatten(0, 1), nn.BatchNorm1d(8)),
    "instance_norm": (swapped, nn.InstanceNorm1d(8)),
    "conv1d": (lambda x: x, nn.Conv1d(6, 4, 3)),
    "conv1d_transposed": (swapped, nn.Conv1d(8, 4, 3)),
    "conv2d_channels_last": (as_image, nn.Conv2d(8, 4, 2)),
    "deconvolution": (swapped, nn.ConvTranspose1d(8, 4, 3)),
    "max_pool_channels_last": (as_image, nn.MaxPool2d(2)),
    "mean_pool_channels_last": (as_image, nn.AvgPool2d(2)),
    "adaptive_pool_channels_last": (as_image, nn.AdaptiveAvgPool2d(1)),
    "max_pool_transposed": (lambda x: F.max_pool1d(swapped(x), 2), None),
    "upsample_channels_last": (as_image, nn.Upsample(scale_factor=2)),
    "softmax_transposed": (lambda x: swapped(x).softmax(-1), None),
    "log_softmax_transposed": (lambda x: swapped(x).log_softmax(1), None),
    "gelu_transposed": (lambda x: F.gelu(swapped(x)), None),
    "where_transposed": (lambda x: torch.where(swapped(x) > 0, swapped(x), 0.5), None),
    "matmul_transposed": (lambda x: swapped(x) @ x, None),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), None),
    "attention_heads": (lambda x: F.scaled_dot_product_attention(*3 * (x.unflatten(2, (2, 4)).transpose(1, 2),)), None),
    "cat_transposed": (lambda x: torch.cat([swapped(x), swapped(x)], 1), None),
    "stack_of_slices": (lambda x: torch.stack([x[:, ::2], x[:, 1::2]], 1), None),
    "cumsum_transposed": (lambda x: swapped(x).cumsum(1), None),
    "flip_transposed": (lambda x: swapped(x).flip(1), None),
    "pad_transposed": (lambda x: F.pad(swapped(x), (1, 1)), None),
    "gather": (lambda x: swapped(x).gather(1, torch.zeros(3, 2, 6, dtype=torch.int64)), None),
    "index": (lambda x: swapped(x)[:, torch.tensor([2, 0])], None),
    "one_step": (lambda x: x[:, -1], None),
    "expanded": (lambda x: x.mean(1, keepdim=True).expand(-1, 6, -1) * 2, None),
    "repeat": (lambda x: swapped(x).repeat(1, 2, 1), None),
    "prelu": (swapped, nn.PReLU()),
    "glu": (lambda x: F.glu(swapped(x), 1), None),
    "lstm": (lambda x: x, nn.Sequential(nn.LSTM(8, 4, batch_first=True))),
    "dropout_transposed": (lambda x: F.dropout(swapped(x), 0.5), None),
    "norm": (lambda x: F.normalize(swapped(x), dim=1), None),
    "weight_norm": (lambda x: x, torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))),
}


@pytest.mark.parametrize("name", CASES)
def test_every_result_is_laid_out_as_the_graph_says(name: str) -> None:
    apply, layer = CASES[name]
    assert misdescribed(Applied(apply, layer), torch.randn(3, 6, 8)) == []
