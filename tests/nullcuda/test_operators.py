"""Operators that eager PyTorch runs on CUDA and not on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from encore.lower.calls import callable_for
from nullcuda.steps import compiled_step


class Operators(TorchDispatchMode):
    """The operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators(run: Callable[[], Any], of: str) -> list[str]:
    with Operators() as seen:
        run()
    return [name for name in seen.names if of in name]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(64, 192) for _ in range(4))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for project in self.project:
            q, k, v = (part.view(8, 128, 4, 16).transpose(1, 2) for part in project(x).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
            x = attended.transpose(1, 2).reshape(8, 128, 64)
        return x.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_without_dropout_is_recomputed(dtype: torch.dtype) -> None:
    x = torch.randn(8, 128, 64, device="cuda", dtype=dtype)
    kept = compiled_step(Attention(0.0).to("cuda", dtype), [x], overhead=0, lowering="eager")
    lean, drawn = (
        compiled_step(Attention(dropout).to("cuda", dtype), [x], budget="min", lowering="eager")
        for dropout in (0.0, 0.1)
    )
    assert lean.predicted <= drawn.predicted
    assert lean.predicted < kept.predicted
    for step in (kept, lean, drawn):
        assert step.measured <= step.predicted


FUNCTIONAL = torch.ops.aten._native_batch_norm_legit_functional.default
SIZES = {"2d": (8, 16, 8, 8), "1d": (8, 16, 32), "rows": (8, 16)}


@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_normalisations_run_on_eagers_operators(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn(shape, device="cuda", dtype=dtype)
    weight, bias, mean, variance = (torch.randn(16, device="cuda") for _ in range(4))
    eager = operators(
        lambda: F.batch_norm(x, mean.clone(), variance.clone(), weight.requires_grad_(), bias, True).backward(grad),
        "norm",
    )
    x, weight = x.detach(), weight.detach()
    found: list[Any] = []

    def planned() -> None:
        found.extend(callable_for(FUNCTIONAL)(x, weight, bias, mean, variance, True, 0.1, 1e-5))
        backward = callable_for(torch.ops.aten.native_batch_norm_backward.default)
        found.extend(backward(grad, x, weight, None, None, found[1], found[2], True, 1e-5, [True, True, True]))

    assert {name for name in operators(planned, "norm") if "cudnn" in name} == {
        name for name in eager if "cudnn" in name
    }
    assert ("cudnn_batch_norm" in eager) == (len(shape) > 2)
    assert found[3].data_ptr() != mean.data_ptr()  # running statistics are results, and not written to
    assert operators(
        lambda: callable_for(torch.ops.aten._native_batch_norm_legit.no_stats)(x, weight, bias, True, 0.1, 1e-5),
        "cudnn",
    ) == [name for name in eager if name == "cudnn_batch_norm"]


def test_channels_last_stays_with_pytorchs_kernel() -> None:
    """cuDNN would keep a reserve for backward."""
    x = torch.randn(8, 16, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    weight, bias, mean, variance = (torch.randn(16, device="cuda") for _ in range(4))
    assert not operators(lambda: callable_for(FUNCTIONAL)(x, weight, bias, mean, variance, True, 0.1, 1e-5), "cudnn")


@pytest.mark.parametrize("options", [{"overhead": 0}, {"budget": "min"}], ids=str)
def test_a_convolutional_network_within_its_prediction(options: dict[str, Any], lowering: str) -> None:
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10))
    step = compiled_step(model.cuda(), [torch.randn(16, 3, 32, 32, device="cuda")], lowering=lowering, **options)
    assert step.measured <= step.predicted <= 1.01 * step.measured
