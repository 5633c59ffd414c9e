"""A budget in percent is one of the largest unplanned step so far, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_same, run_step

WIDTH = 16
LARGE, SMALL = 1024, 4
"""Rows of a batch whose activations take most of the step, and of one in which parameters do."""


class Deep(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        layers = range(6 if breaks else 3)
        self.first = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in layers))
        self.second = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x).sum()


WAYS: dict[str, Callable[..., Any]] = {
    "encore.compile": encore.compile,
    "torch.compile": lambda model, **options: torch.compile(model, backend="encore", options=options),
}


def step(model: Any, rows: int) -> encore.Report:
    """Run a step on so many rows and return its report; the results are those of eager."""
    inner = getattr(model, "_orig_mod", model)
    twin = Deep(breaks=inner.breaks)
    twin.load_state_dict(inner.state_dict())
    x = torch.randn(rows, WIDTH)
    have = {name.replace("_orig_mod.", ""): tensor for name, tensor in run_step(model, (x,)).items()}
    assert_same(have, run_step(twin, (x,)), "eager")
    return encore.report(model)


def total(report: encore.Report, which: str = "planned") -> int:
    return report.resident + getattr(report, which).step_peak


def test_a_small_batch_alone_cannot_keep_the_share() -> None:
    """The premise of the tests below."""
    with pytest.raises(encore.BudgetError):
        step(encore.compile(Deep(), budget="80%", lowering="eager"), SMALL)


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two graphs"])
@pytest.mark.parametrize("way", WAYS)
def test_a_smaller_batch_keeps_the_share_of_a_larger_one(way: str, breaks: bool) -> None:
    model = WAYS[way](Deep(breaks=breaks), budget="80%", lowering="eager")
    limit = total(step(model, LARGE), "unplanned") * 8 // 10
    last = step(model, SMALL)
    assert total(last) <= limit
    if not breaks:
        assert last.budget == limit
        assert total(last) == total(last, "unplanned"), "everything fits, so everything is kept"


def test_a_larger_batch_raises_the_share() -> None:
    model = encore.compile(Deep(), budget="80%", lowering="eager")
    limits = []
    for rows in (LARGE, SMALL, 2 * LARGE):
        report = step(model, rows)
        limits.append(report.budget)
        assert report.budget is not None
        assert total(report) <= report.budget
    assert limits[0] == limits[1]
    assert limits[2] == total(report, "unplanned") * 8 // 10


def test_a_refused_step_raises_nothing() -> None:
    """A batch that was refused has not been a step: its bytes are no base for the next."""
    model = encore.compile(Deep(), budget="10%", lowering="eager")
    with pytest.raises(encore.BudgetError) as first:
        step(model, 4 * LARGE)
    with pytest.raises(encore.BudgetError) as second:
        step(model, SMALL)
    with pytest.raises(encore.BudgetError) as alone:
        step(encore.compile(Deep(), budget="10%", lowering="eager"), SMALL)
    assert str(second.value) == str(alone.value)
    assert first.value.floor > second.value.floor


def test_models_share_no_base() -> None:
    step(encore.compile(Deep(), budget="80%", lowering="eager"), LARGE)
    with pytest.raises(encore.BudgetError):
        step(encore.compile(Deep(), budget="80%", lowering="eager"), SMALL)


@pytest.mark.slow
def test_a_larger_share_is_never_slower_and_a_smaller_one_never_higher() -> None:
    smallest = step(encore.compile(Deep(), budget="min", lowering="eager"), LARGE)
    lowest = -(-100 * total(smallest) // total(smallest, "unplanned"))  # how low it is depends on workspaces
    assert lowest < 90
    found = []
    for share in (lowest, 90, 100):
        model = encore.compile(Deep(), budget=f"{share}%", lowering="eager")
        step(model, LARGE)
        found.append(step(model, LARGE // 2))
    peaks, overheads = [total(report) for report in found], [report.planned.overhead for report in found]
    assert peaks == sorted(peaks)
    assert overheads == sorted(overheads, reverse=True)
