"""Views, writes in place, aliases among inputs and outputs, and autograd's own tools inside user code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import encore
from support.compare_with_eager import assert_matches_eager, run_step
from support.rounding import assert_close

pytestmark = pytest.mark.mostly_eager


def data(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 6)), requires_grad=True)


# -- views and writes ------------------------------------------------------------------------------------------------


def column(x: Tensor, y: Tensor) -> Tensor:
    x = x * 2
    x[:, 0] = y[:, 1]
    return x.sin()


def loop(x: Tensor, y: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for row in range(x.shape[0]):
        result[row] = (result[row - 1] + x[row] * y[row]).tanh()
    return result


def chain(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone().add_(y).relu_() * y
    z.view(-1)[::2].add_(1)
    z.t().masked_fill_(z.t() > 1, 0.5)
    return (z * x).contiguous()  # a write through a transposed view leaves its strides on the functional result


def aliases(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x @ y.t()
    return z, z.t(), z[0], x, y.view(-1)


def write_then_alias(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x * y
    part = z[:, 1:3]
    part.mul_(y[:, :2])
    return z, part


def same_twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = (x * y).exp()
    return z, z


WRITES = (column, loop, chain, aliases, write_then_alias, same_twice)


@pytest.mark.parametrize("function", WRITES)
def test_views_and_writes(function: Callable[..., Any], lowering: str) -> None:
    assert_matches_eager(function, data(4, 4), data(4, 4), lowering=lowering)


def test_an_input_that_is_returned_and_used_gets_its_gradients_in_another_order(lowering: str) -> None:
    """AOTAutograd adds the gradient of a returned input outside the graph: the last bit may differ."""

    def input_and_its_copy(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x @ y.t(), x, x * 1

    given = (data(4, 4), data(4, 4))
    planned, expected = (
        run_step(step, given) for step in (encore.compile(input_and_its_copy, lowering=lowering), input_and_its_copy)
    )
    assert planned.keys() == expected.keys()
    for name, want in expected.items():
        if want.is_floating_point():
            assert_close(planned[name], want, name)
        else:
            assert torch.equal(planned[name], want), name


def test_outputs_alias_as_in_eager(lowering: str) -> None:
    planned, x, y = encore.compile(aliases, lowering=lowering), data(4, 4), data(4, 4)
    z, transposed, row, same, flat = planned(x, y)
    assert same is x
    assert z.data_ptr() == transposed.data_ptr() == row.data_ptr()
    assert flat.data_ptr() == y.data_ptr()
    first, second = encore.compile(same_twice, lowering=lowering)(x, y)
    assert first.data_ptr() == second.data_ptr()


def test_an_input_is_written_to(lowering: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        x[0] = 1
        return x * y

    assert_matches_eager(function, torch.randn(4, 4), data(4, 4), lowering=lowering)


# -- autograd inside -------------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """A derivative that is wrong on purpose: only Cube's own backward gives it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * 7 * ctx.scale * x, None


def test_a_custom_function(lowering: str) -> None:
    x = data(3, 4)
    planned = assert_matches_eager(lambda x: Cube.apply(x.sin(), 2.0).cos(), x, lowering=lowering)
    assert planned(x).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside(reentrant: bool, lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    assert_matches_eager(Model(), data(), graphs=None, lowering=lowering)
