"""Additive attention's scores with the GPU's kernels, in Triton's interpreter: against the formula in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from encore.rnn import WORKSPACES, scores
from support.attention_inputs import by_formula, gradients, operands
from support.gpu_kernels import interpreted, taken_aside

scores_gpu = pytest.importorskip("encore.rnn.scores_gpu")

SCORES: Any = torch.ops.encore.additive_scores
BACKWARD: Any = torch.ops.encore.additive_scores_backward


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_gpu, "scores", interpreted("scores"))
    monkeypatch.setattr(scores_gpu, "recurrent", interpreted("recurrent"))
    monkeypatch.setattr(scores, "_cpu_kernels", lambda: scores_gpu)


def exactly(given: list[Any], grad: Tensor) -> list[Tensor]:
    wide = [one.detach().double().requires_grad_() if isinstance(one, Tensor) else one for one in given]
    return gradients(by_formula, wide, grad.double())


def check(given: list[Any], grad: Tensor) -> None:
    found, exact = gradients(SCORES, given, grad), exactly(given, grad)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == grad.dtype
        allowed = torch.finfo(grad.dtype).eps ** 0.5  # half of the digits
        assert float((one.double() - other).norm() / (1 + other.norm())) < allowed


@pytest.mark.parametrize(
    ("bias", "norm", "dtype"),
    [
        (False, "", torch.float64),
        (True, "", torch.bfloat16),
        (False, "plain", torch.float64),
        (True, "affine", torch.float64),
        (True, "affine", torch.float32),
        (False, "affine", torch.float16),
    ],
)
def test_as_the_formula(bias: bool, norm: str, dtype: torch.dtype) -> None:
    given = operands(2, 3, 5, 6, bias=bias, norm=norm, dtype=dtype)
    check(given, torch.randn(2, 3, 5, dtype=torch.float64).to(dtype))


def test_several_tiles_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wider than a tile, more keys than a tile, more queries than programs."""
    monkeypatch.setattr(scores_gpu, "GROUPS", 2)
    check(
        operands(1, 3, 5, 270, bias=True, norm="affine", dtype=torch.float64), torch.randn(1, 3, 5, dtype=torch.float64)
    )


def test_any_layout() -> None:
    given = operands(2, 3, 4, 5, bias=True, norm="affine", dtype=torch.float64)
    given[:2] = [one.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for one in given[:2]]
    given[2] = torch.stack([given[2], given[2]], -1).detach()[..., 0].requires_grad_()
    check(given, torch.randn(2, 4, 3, dtype=torch.float64).transpose(1, 2))


def test_onto_and_not_needed() -> None:
    given = [
        one.detach() if isinstance(one, Tensor) else one
        for one in operands(2, 2, 3, 4, bias=True, norm="", dtype=torch.float64)
    ]
    grad, onto = torch.randn(2, 2, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    alone = BACKWARD(None, grad, *given, False, True, False)
    added = BACKWARD(onto, grad, *given, True, True, True)
    torch.testing.assert_close(added[0], alone[0] + onto)
    assert [one.numel() for one in alone[1:]] == [0] * 5


@pytest.mark.parametrize("norm", ["", "affine"])
def test_memory_aside_is_within_what_is_told(norm: str) -> None:
    given = [
        one.detach() if isinstance(one, Tensor) else one
        for one in operands(2, 2, 3, 8, bias=True, norm=norm, dtype=torch.float32)
    ]
    grad = torch.randn(2, 3, 2).transpose(1, 2)
    for call, arguments in ((SCORES.default, given), (BACKWARD.default, [None, grad, *given, True, True, True])):
        aside, _ = taken_aside(functools.partial(call, *arguments))
        assert aside == WORKSPACES[call](*arguments)


def test_chosen_for_cuda() -> None:
    assert scores.kernels_for(torch.device("cuda")) is scores_gpu
