"""Errors reach the caller as themselves, also through `torch.compile`, and code that reacts to them recognizes them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore


def wide_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


class Breaking(nn.Module):
    """The second graph is compiled while code of the user runs between it and Dynamo's first frame."""

    def __init__(self) -> None:
        super().__init__()
        self.model = wide_model()

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.model(x)


WAYS: dict[str, Callable[..., Any]] = {
    "encore.compile": encore.compile,
    "torch.compile": lambda model, **options: torch.compile(model, backend="encore", options=options),
}


@pytest.mark.parametrize("make", [wide_model, Breaking])
@pytest.mark.parametrize("way", WAYS)
def test_a_refused_budget(way: str, make: Callable[[], nn.Module]) -> None:
    model = WAYS[way](make(), budget=16)
    with pytest.raises(encore.BudgetError, match="lowest reachable peak") as caught:
        model(torch.randn(4, 8))
    assert type(caught.value) is encore.BudgetError
    assert caught.value.floor > 16
    assert caught.value.__suppress_context__


def test_a_refused_option_through_torch_compile() -> None:
    with pytest.raises(encore.OptionError, match="unknown option 'bugdet'"):
        WAYS["torch.compile"](wide_model(), bugdet=16)(torch.randn(4, 8))


def test_other_errors_of_a_backend_stay_what_dynamo_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("encore.compiler.backend.build_graph", fail)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="ZeroDivisionError: a bug"):
        WAYS["torch.compile"](wide_model())(torch.randn(4, 8))


def refused() -> encore.BudgetError:
    with pytest.raises(encore.BudgetError) as caught:
        encore.compile(wide_model(), budget=16)(torch.randn(4, 8))
    return caught.value


def test_a_budget_error_is_an_out_of_memory_error() -> None:
    error = refused()
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, RuntimeError)
    assert " out of memory." in str(error)
    assert len(error.args) == 1, "finders of batch sizes look at errors with one argument"


def test_a_budget_error_goes_through_a_pickle() -> None:
    error = refused()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is encore.BudgetError
    assert (str(again), again.floor) == (str(error), error.floor)
    assert (again.pins, again.remedies) == (error.pins, error.remedies)


def test_accelerate_finds_a_batch_that_fits() -> None:
    memory = pytest.importorskip("accelerate.utils.memory")
    inner = wide_model()
    model = encore.compile(inner, lowering="eager", budget="min")
    model(torch.randn(16, 8)).sum().backward()
    budget = encore.report(model).resident + encore.report(model).planned.step_peak
    tried = []

    @memory.find_executable_batch_size(starting_batch_size=20)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        encore.compile(inner, budget=budget, lowering="eager")(torch.randn(batch_size, 8)).sum().backward()
        return batch_size

    assert train() == 16
    assert tried == [20, 18, 16]
    assert all(parameter.grad is not None for parameter in inner.parameters())
