"""Sums in stages are the sums they stand for, whatever the shape, and as accurate as PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from encore.lower import decompositions
from encore.lower.decompositions import LONG, PIECE, mean_in_stages, sum_in_stages, var_mean_in_stages
from support.rounding import assert_as_accurate

SHAPES = [
    ((2048, 3), [0]),
    ((1000, 3), [0]),
    ((16, 4, 20, 20), [0, 2, 3]),
    ((5, 300), [1]),
    ((5, 300), [-1]),
    ((70000,), [0]),
]


@pytest.fixture(autouse=True)
def inner_sums_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a trace: sums inside the formulas are taken in stages again."""
    plain = torch.ops.aten.sum.dim_IntList

    class Sums:
        def dim_IntList(self, source: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:  # noqa: N802
            found = sum_in_stages(source, dim, keepdim)
            return plain(source, dim, keepdim) if found is NotImplemented else found

    class Operators:
        sum = Sums()

    monkeypatch.setattr(decompositions, "aten", Operators())


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("keepdim", [False, True])
def test_sums(shape: tuple[int, ...], dims: list[int], keepdim: bool) -> None:
    torch.manual_seed(0)
    source = torch.randn(shape) + 1
    found = sum_in_stages(source, dims, keepdim)
    exact, eager = source.double().sum(dims, keepdim), source.sum(dims, keepdim)
    assert found.shape == exact.shape
    assert (found - exact).norm() <= 2 * (eager - exact).norm() + 1e-7 * exact.norm()


@pytest.mark.parametrize("size", [LONG - 1, LONG, LONG + 1, LONG + PIECE - 1, PIECE * LONG + 7])
def test_every_length_comes_to_an_end(size: int) -> None:
    found = sum_in_stages(torch.ones(size, 2), [0])
    assert found is NotImplemented if size < LONG else torch.equal(found, torch.full((2,), float(size)))


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_means_and_variances(shape: tuple[int, ...], dims: list[int]) -> None:
    torch.manual_seed(0)
    source = torch.randn(shape) + 3
    variance, mean = var_mean_in_stages(source, dims, correction=0)
    exact_variance, exact_mean = torch.var_mean(source.double(), dims, correction=0)
    eager_variance, eager_mean = torch.var_mean(source, dims, correction=0)
    assert_as_accurate(variance, eager_variance, exact_variance)
    assert_as_accurate(mean, eager_mean, exact_mean)
    assert_as_accurate(mean_in_stages(source, dims), eager_mean, exact_mean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    assert sum_in_stages(torch.ones(2 * LONG, dtype=dtype), [0]) is NotImplemented
