"""Autocast to bfloat16, inside the model and around it.

Tracing treats each use of a weight apart, as eager does with `cache_enabled=False`: then every bit is the same. With
its cache, eager adds up the gradients of a weight that is used several times in bfloat16; Encore adds them up in
float32, which is closer to the truth, and this is tested too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_matches_eager, assert_same, run_step
from support.lowerings import in_both_lowerings

pytestmark = pytest.mark.mostly_eager


class Inside(nn.Module):
    """Runs another model under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return self.model(x)


class Again(nn.Module):
    """One layer, three times."""

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
@in_both_lowerings("model", MODELS, ["norms"])
def test_autocast_inside(model: str, leaf: bool, lowering: str) -> None:
    make, shape = MODELS[model]
    assert_matches_eager(
        Inside(make()), torch.randn(shape, requires_grad=leaf), lowering=lowering, narrow=torch.bfloat16
    )


@in_both_lowerings("model", MODELS, ["dropout"])
def test_autocast_around(model: str, lowering: str) -> None:
    make, shape = MODELS[model]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert_matches_eager(make(), torch.randn(shape), lowering=lowering, narrow=torch.bfloat16)


def test_gradients_of_a_layer_used_again_are_closer_to_the_truth_than_with_eagers_cache(lowering: str) -> None:
    eager, x = Again(), torch.randn(64, 6)
    planned = encore.compile(copy.deepcopy(eager), lowering=lowering)
    truth = run_step(eager, (x,))["gradient of layer.weight"]
    with torch.autocast("cpu", torch.bfloat16):
        errors = [(run_step(model, (x,))["gradient of layer.weight"] - truth).norm() for model in (planned, eager)]
    assert errors[0] <= errors[1]


def test_with_autocast_and_without_it_are_two_variants(lowering: str) -> None:
    eager = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    x = torch.randn(5, 6)
    expected = {}
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            expected[low] = run_step(eager, (x,))
    planned = encore.compile(eager, lowering=lowering)
    for low in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            assert_same(run_step(planned, (x,)), expected[low], lowering, narrow=torch.bfloat16 if low else None)


def test_a_model_in_bfloat16(lowering: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)).bfloat16()
    assert_matches_eager(model, torch.randn(5, 6).bfloat16(), lowering=lowering)
