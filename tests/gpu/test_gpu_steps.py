"""Steps on a real GPU: numbers against eager PyTorch, peaks against the allocator. `pytest -m gpu`, on a machine with
one; everywhere else these tests are skipped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from encore.devices import is_here, synchronize
from nullcuda.null_device import is_here as null_device_is_here

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_here(DEVICE) or null_device_is_here(), reason="there is no GPU"),
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.ModuleList(nn.Linear(64, 192) for _ in range(3)), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for project in self.project:
            q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in project(x).chunk(3, -1))
            x = self.norm(x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x


class Last(nn.Module):
    """The output sequence of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)[0]
        return output


def convolutions() -> nn.Module:
    block = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *block, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 64), nn.ReLU()
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (512, 64)),
    "convolutions": (convolutions, (16, 3, 32, 32)),
    "attention": (Attention, (8, 128, 64)),
    "lstm": (lambda: Last(nn.LSTM(64, 64, num_layers=2)), (40, 8, 64)),
    "gru": (lambda: Last(nn.GRU(64, 64, bidirectional=True)), (40, 8, 64)),
    "encore's lstm": (lambda: Last(encore.nn.LSTM(64, 64)), (40, 8, 64)),
}


class Scored(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scored: torch.Tensor = self.model(x).square().mean()
        return scored


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    model(x).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.fixture
def _deterministic() -> Any:
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"overhead": 0}, {"budget": "min"}], ids=str)
def test_the_eager_lowering_has_eagers_gradients(name: str, options: dict[str, Any]) -> None:
    make, shape = MODELS[name]
    eager = Scored(make()).to(DEVICE)
    planned = copy.deepcopy(eager)
    x = torch.randn(shape, device=DEVICE)
    encore.compile(planned, lowering="eager", **options)
    for _ in range(2):
        expected, found = gradients(eager, x), gradients(planned, x)
        assert expected.keys() == found.keys()
        for weight, grad in expected.items():
            torch.testing.assert_close(found[weight], grad, rtol=0, atol=0, msg=weight)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"overhead": 0}, {"budget": "min"}], ids=str)
def test_steps_stay_within_their_prediction(name: str, options: dict[str, Any], lowering: str) -> None:
    make, shape = MODELS[name]
    model, x = Scored(make()).to(DEVICE), torch.randn(shape, device=DEVICE)
    encore.compile(model, lowering=lowering, **options)
    for _ in range(2):
        gradients(model, x)
    model.zero_grad()
    measured = encore.measure(lambda: model(x).backward()).step_peak
    predicted = encore.report(model).planned.step_peak
    assert measured <= predicted <= 1.01 * measured + 4096


@pytest.mark.parametrize("name", MODELS)
def test_fused_steps_are_as_close_to_float64(name: str) -> None:
    make, shape = MODELS[name]
    model = make().to(DEVICE).eval() if name == "perceptron" else make().to(DEVICE)  # dropout draws other masks
    assert encore.verify(Scored(model), torch.randn(shape, device=DEVICE))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_offloaded_steps_have_eagers_gradients(tier: str) -> None:
    eager = Scored(convolutions()).to(DEVICE)
    planned = copy.deepcopy(eager)
    x = torch.randn(16, 3, 32, 32, device=DEVICE)
    encore.compile(planned, budget="min", lowering="eager", tiers=tier)
    with torch.Stream(DEVICE):
        for _ in range(3):
            expected, found = gradients(eager, x), gradients(planned, x)
            synchronize()
            for weight, grad in expected.items():
                torch.testing.assert_close(found[weight], grad, msg=weight)
