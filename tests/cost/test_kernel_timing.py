"""Which kernels are timed on made-up operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from encore.cost.kernel_timing import may_run
from encore.schedule import Fused, fuse
from support.captured_graphs import captured


def as_it_is(scores: Tensor, index: Tensor) -> Tensor:
    return (scores.gather(1, index) * 2).exp().sum()


def through_views(scores: Tensor, index: Tensor) -> Tensor:
    return (scores.gather(1, index.t().reshape(4, 2)) * 2).exp().sum()


def computed(scores: Tensor, index: Tensor) -> Tensor:
    return (scores.gather(1, 2 * index - 1) * 2).exp().sum()


def computed_row(scores: Tensor, index: Tensor) -> Tensor:
    return (scores.exp()[torch.arange(4)[:, None], index - 1] * 2).exp().sum()


@pytest.mark.parametrize(
    ("function", "tried"), [(as_it_is, True), (through_views, True), (computed, False), (computed_row, False)]
)
def test_a_kernel_that_computes_an_index_is_not_tried(
    function: Callable[[Tensor, Tensor], Tensor], tried: bool
) -> None:
    """Of made-up operands, -1: out of bounds, which ends the process where several threads run the kernel."""
    schedule = fuse(
        captured(function, torch.randn(4, 9, requires_grad=True), torch.ones(4, 2, dtype=torch.int64)).plan.schedule
    )
    kernels = [action.kernel for action in (*schedule.forward, *schedule.backward) if isinstance(action, Fused)]
    assert all(may_run(kernel) for kernel in kernels) is tried
