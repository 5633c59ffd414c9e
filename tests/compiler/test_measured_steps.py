"""Steps above their budget for what runs outside of the captured graphs: measured, planned around, and told."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from encore.api import compiled_call
from encore.compiler.measured_steps import MeasuredSteps
from encore.errors import BudgetError, BudgetExceededError, OptionError

CLASSES, ROWS = 200, 256
X, WANTED = torch.randn(ROWS, 64), torch.randint(CLASSES, (ROWS,))
pytestmark = pytest.mark.filterwarnings("ignore:.*Memory block of unknown size.*:UserWarning")


def classifier() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


def metrics(scores: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return scores.softmax(1)


def step(model: nn.Module) -> None:
    scores = model(X)
    shares = metrics(scores)
    loss = F.cross_entropy(scores, WANTED)
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    del shares


def measured(model: nn.Module) -> MeasuredSteps:
    return compiled_call(model).session.step.measured


@pytest.fixture
def running() -> Iterator[Callable[[nn.Module, int], list[str]]]:
    """Runs steps; returns the warnings of Encore that they gave."""

    def run(model: nn.Module, steps: int) -> list[str]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(steps):
                step(model)
        return [str(one.message) for one in warned if "encore" in str(one.message)]

    torch._dynamo.reset()
    yield run
    torch._dynamo.reset()


Running = Callable[[nn.Module, int], list[str]]


def test_one_graph_is_planned_around_the_loss_outside(running: Running) -> None:
    plain = classifier()
    model = encore.compile(copy.deepcopy(plain), budget="1300KiB", lowering="eager")
    assert running(model, 6) == []
    program = compiled_call(model).session.step.last
    assert program is not None
    assert program.settled
    assert program.limit == 1300 << 10
    for parameter in model.parameters():
        parameter.grad = None
    peak = encore.measure(lambda: step(model)).step_peak
    assert peak + program.resident <= program.limit
    step(plain)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


def test_what_cannot_be_planned_away_is_told_once_with_its_lines(running: Running) -> None:
    model = encore.compile(classifier(), budget="1000KiB", lowering="eager")
    (message,) = running(model, 9)
    assert "more than its budget of 1000.00 KiB" in message
    for line in ("in metrics: softmax", "in step: cross_entropy_loss", "in step: LogSoftmaxBackward0"):
        assert line in message
    taken = measured(model).latest
    assert taken is not None
    assert taken.plain is not None
    assert taken.limit is not None
    assert taken.excess == taken.taken - taken.limit > 0
    assert f"raise the budget to {taken.taken} bytes" in message
    again = encore.compile(classifier(), budget=taken.taken, lowering="eager")
    assert running(again, 6) == []


def test_strict_raises_before_the_next_step(running: Running) -> None:
    model = encore.compile(classifier(), budget="1000KiB", lowering="eager", strict=True)
    # The third step and the fourth try plans around what was observed.
    with pytest.raises(BudgetExceededError, match=r"test_measured_steps.py:\d+ in step: cross_entropy_loss") as raised:
        running(model, 6)
    assert isinstance(raised.value, BudgetError)
    assert "out of memory." in str(raised.value)
    assert raised.value.floor > 1000 << 10
    step(model)  # the error is of the step before: this one begins anew
    torch._dynamo.reset()
    enough = encore.compile(classifier(), budget="8MiB", lowering="eager", strict=True)
    assert running(enough, 4) == []


def test_a_step_within_its_budget_records_no_lines_and_is_rarely_measured(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    begin = MeasuredSteps.begin

    def noted(self: MeasuredSteps, *args: object, **options: object) -> object:
        observation = begin(self, *args, **options)  # type: ignore[arg-type]
        begun.extend([observation.lines] if observation is not None else [])
        return observation

    monkeypatch.setattr(MeasuredSteps, "begin", noted)
    model = encore.compile(classifier(), budget="8MiB", lowering="eager")
    assert running(model, 17) == []
    assert begun == [False] * 4  # steps 2, 4, 8, 16
    latest = measured(model).latest
    assert latest is not None
    assert latest.number in (8, 16)
    assert latest.excess == 0


def test_strict_wants_a_budget() -> None:
    with pytest.raises(OptionError, match="no effect without budget"):
        encore.compile(classifier(), strict=True)
    model = torch.compile(classifier(), backend="encore", options={"budget": "1MiB", "strict": True})
    with pytest.raises(OptionError, match=r"use encore.compile"):
        model(X)
    with pytest.raises(OptionError, match="give True or False"):
        encore.compile(classifier(), budget="1MiB", strict="yes")
