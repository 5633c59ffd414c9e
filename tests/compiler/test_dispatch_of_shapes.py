"""What a call costs before its graph runs: no more with hundreds of shapes than with one, counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame, eval_frame

import encore
from encore.api import compiled_call


class Scaled(nn.Module):
    """A model whose graphs are small."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).square().sum()


def calls_of(run: Callable[[], Any]) -> int:
    """The least number of Python and C functions that are called while something runs, of three times."""
    counts = []
    for _ in range(3):
        count = 0

        def see(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(see)
        try:
            run()
        finally:
            sys.setprofile(None)
        counts.append(count)
    return min(counts)


def entries_by_region(model: nn.Module) -> list[int]:
    """How many entries of Dynamo's cache, each with guards of its own, a call of the model may look at: one number for
    each region of the cache."""
    codes = [code for reference in list(convert_frame.input_codes.seen) if (code := reference()) is not None]
    regions = compiled_call(model)._planned._regions
    return [sum(len(eval_frame._get_cache_entries_for_region(code, region)) for code in codes) for region in regions]


@pytest.mark.filterwarnings("ignore:encore. .* were compiled anew:UserWarning")
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_call_costs_the_same_with_many_shapes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encore.compiler.shapes.MOST_GRAPHS", 2 * count)
    model = encore.compile(Scaled(), lowering="eager")
    first = torch.randn(2, 3)
    for _ in range(3):
        model(first).backward()
    alone = calls_of(lambda: model(first))
    assert entries_by_region(model) == [1]
    for rows in range(3, 2 + count):
        model(torch.randn(rows, 3)).backward()
    model(first).backward()
    assert calls_of(lambda: model(first)) <= alone
    assert set(entries_by_region(model)) == {1}  # the guards of one shape, however many there are


def test_with_a_limit_all_shapes_share_their_guards() -> None:
    """What is counted above is there to be counted."""
    model = encore.compile(Scaled(), lowering="eager", recompile_limit=8)
    for rows in range(2, 5):
        model(torch.randn(rows, 3)).backward()
    assert entries_by_region(model) == [3]
