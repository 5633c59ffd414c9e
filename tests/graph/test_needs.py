"""The table of needs against the operators themselves: what an operator is said not to look at may be anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from encore.graph import OpClass, classify
from encore.graph.needs import COMPARISONS, NEEDS, Need
from encore.graph.ops import is_fusible
from encore.graph.sized_ops import SIZED

aten = torch.ops.aten
SHAPE = (2, 6, 9, 11)


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def with_oddities(x: torch.Tensor) -> torch.Tensor:
    """Zeros of both signs, infinities, and what lies right on a bound."""
    flat = x.view(-1)
    for place, odd in enumerate((0.0, -0.0, float("inf"), float("-inf"), 3.0, -3.0, 0.5, -0.5)):
        flat[17 * place] = odd
    return x


FORMULAS: dict[Any, tuple[Any, ...]] = {
    aten.threshold_backward.default: (0.0,),
    aten.leaky_relu_backward.default: (0.2, False),
    aten.hardtanh_backward.default: (-0.5, 0.5),
    aten.hardsigmoid_backward.default: (),
}
BOUNDS = {
    aten.threshold_backward.default: (0.0,),
    aten.leaky_relu_backward.default: (0.0,),
    aten.hardtanh_backward.default: (-0.5, 0.5),
    aten.hardsigmoid_backward.default: (-3.0, 3.0),
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_signs_are_all_that_some_formulas_look_at(formula: Any) -> None:
    assert NEEDS[formula] == {1: Need.SIGN}
    gradient, source = noise(1), with_oddities(noise(2) * 3)
    low, high = (BOUNDS[formula] * 2)[:2] if len(BOUNDS[formula]) == 1 else BOUNDS[formula]
    inside = (low + high) / 2
    like = torch.where(source > high, high + 7.0, torch.where(source < low, low - 7.0, inside))
    like = torch.where((source == low) | (source == high), source, like)
    found, want = formula(gradient, like, *FORMULAS[formula]), formula(gradient, source, *FORMULAS[formula])
    assert torch.equal(found.view(torch.int32), want.view(torch.int32))


def test_comparisons_answer_with_booleans() -> None:
    for target, needs in COMPARISONS.items():
        second = (noise(2) > 0,) if 1 in needs else () if target._overloadname == "default" else (0.0,)
        assert target(noise(1) > 0, *second).dtype is torch.bool
        assert set(needs.values()) == {Need.SIGN}


Pooling = Callable[[torch.Tensor], tuple[Any, ...]]


def _pooled(forward: Any, *settings: Any, positions: bool) -> Pooling:
    """Arguments of the backward formula, the layer's input left out."""

    def arguments(x: torch.Tensor) -> tuple[Any, ...]:
        results, *places = forward(x, *settings) if positions else (forward(x, *settings),)
        return torch.randn(results.shape, generator=torch.Generator().manual_seed(3)), *places

    return arguments


CASES: dict[Any, tuple[Pooling, Callable[..., tuple[Any, ...]]]] = {
    aten.max_pool2d_with_indices_backward.default: (
        _pooled(aten.max_pool2d_with_indices.default, [3, 3], [2, 2], [1, 1], positions=True),
        lambda places: ([3, 3], [2, 2], [1, 1], [1, 1], False, places),
    ),
    aten.max_pool3d_with_indices_backward.default: (
        _pooled(aten.max_pool3d_with_indices.default, [2, 2, 2], [2, 2, 2], positions=True),
        lambda places: ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, places),
    ),
    aten.adaptive_max_pool2d_backward.default: (
        _pooled(aten.adaptive_max_pool2d.default, [4, 3], positions=True),
        lambda places: (places,),
    ),
    aten.adaptive_max_pool3d_backward.default: (
        _pooled(aten.adaptive_max_pool3d.default, [2, 4, 3], positions=True),
        lambda places: (places,),
    ),
    aten.avg_pool2d_backward.default: (
        _pooled(aten.avg_pool2d.default, [3, 3], [2, 2], [1, 1], positions=False),
        lambda: ([3, 3], [2, 2], [1, 1], False, True, None),
    ),
    aten.avg_pool3d_backward.default: (
        _pooled(aten.avg_pool3d.default, [2, 2, 2], [2, 2, 2], positions=False),
        lambda: ([2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
    ),
}


@pytest.mark.parametrize("original", SIZED)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_pooling_layer_told_its_size_makes_the_same_gradient(original: Any, layout: torch.memory_format) -> None:
    assert NEEDS[original][1] is Need.SIZE
    if layout is torch.channels_last and original in (aten.max_pool3d_with_indices_backward.default,):
        pytest.skip("PyTorch's own refuses it")
    x = noise(4).contiguous(memory_format=layout)
    make, rest = CASES[original]
    gradient, *places = make(x)
    want = original(gradient, x, *rest(*places))
    have = SIZED[original](gradient, list(want.shape), list(want.stride()), *rest(*places))
    assert torch.equal(have.view(torch.int32), want.view(torch.int32))
    assert have.stride() == want.stride()


def test_operators_that_are_told_sizes_are_cheap_and_stay_separate() -> None:
    for target in SIZED.values():
        assert classify(target) is OpClass.CHEAP
        assert not is_fusible(target)
