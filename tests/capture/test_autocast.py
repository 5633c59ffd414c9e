"""Autocast to bfloat16, inside the model and around it: eager's roundings, casts shared as eager shares them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import encore
from against_eager import assert_matches_eager, assert_same, run_step


class Inside(nn.Module):
    """Runs another model under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


class Again(nn.Module):
    """One layer, three times: eager casts its weight once and adds up its gradients in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x).tanh()
        return x


class Branches(nn.Module):
    """Two layers read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6)),
    "norms": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.BatchNorm1d(8)), (5, 6)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()),
        (2, 2, 6, 6),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Softmax(-1)), (5, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "a layer used again": (Again, (5, 6)),
    "an input read twice": (Branches, (5, 6)),
}


@pytest.mark.parametrize("leaf", [False, True], ids=["input without gradient", "input with gradient"])
@pytest.mark.parametrize("model", MODELS)
def test_autocast_inside(model: str, leaf: bool) -> None:
    make, shape = MODELS[model]
    assert_matches_eager(Inside(make()), torch.randn(shape, requires_grad=leaf))


@pytest.mark.parametrize("model", MODELS)
def test_autocast_around(model: str) -> None:
    make, shape = MODELS[model]
    with torch.autocast("cpu", torch.bfloat16):
        assert_matches_eager(make(), torch.randn(shape))


def test_with_autocast_and_without_it_are_two_variants() -> None:
    eager = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    x = torch.randn(5, 6)
    expected = {}
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            expected[low] = run_step(eager, (x,))
    planned = encore.compile(eager)
    for low in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            assert_same(run_step(planned, (x,)), expected[low])


def test_a_model_in_bfloat16() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)).bfloat16()
    assert_matches_eager(model, torch.randn(5, 6).bfloat16())
