"""The verbs as users type them: what they accept, what they give back, and how they refuse."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encore
from encore import BudgetError, EncoreError, NeverRunError, OptionError
from support.compare_with_eager import assert_matches_eager, assert_same, assert_verified, run_step, session_of
from support.rounding import assert_as_accurate


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def refused(kind: type[EncoreError], action: Callable[[], Any]) -> str:
    """The message of a refusal, which has to fit in one line."""
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


# -- what can be compiled -------------------------------------------------------------------------------------------


def scaled(x: Tensor, weight: Tensor, *, power: int = 2) -> Tensor:
    """Doc of the function."""
    return (x * weight).tanh() ** power


def test_a_function_gives_a_new_function_and_stays_as_it_is(lowering: str) -> None:
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    planned = assert_matches_eager(scaled, x, weight, power=3, lowering=lowering)
    assert planned is not scaled
    assert planned.__name__ == "scaled"
    assert planned.__doc__ == "Doc of the function."
    assert encore.report(planned).name == "scaled"
    with pytest.raises(NeverRunError):
        encore.report(scaled)


def test_the_bare_decorator() -> None:
    @encore.compile
    def square(x: Tensor) -> Tensor:
        return x.sin() * x

    x = torch.randn(3, requires_grad=True)
    square(x).sum().backward()
    assert x.grad is not None
    exact, eager = (one.cos() * one + one.sin() for one in (x.detach().double(), x.detach()))
    assert_as_accurate(x.grad, eager, exact)
    assert encore.report(square).graphs


@pytest.mark.parametrize("options", [{}, {"budget": "1GiB"}, {"overhead": 0.1}, {"budget": "min"}, {"resident": 4096}])
def test_the_decorator_with_options(options: dict[str, Any], lowering: str) -> None:
    @encore.compile(**options, lowering=lowering)
    def square(x: Tensor) -> Tensor:
        return x.sin() * x

    assert_verified(square, torch.randn(3, requires_grad=True))
    assert session_of(square).options.resident == options.get("resident", 0)


def test_a_decorated_method_and_a_bound_method() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def loss(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    model, x = Model(), torch.randn(2, 4)
    loss = encore.compile(model.loss, lowering="eager")
    loss(x).backward()
    have = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.loss(x).backward()
    assert all(torch.equal(have[name], parameter.grad) for name, parameter in model.named_parameters())  # type: ignore[arg-type]
    assert encore.report(loss).graphs


def test_a_lambda_and_a_partial(lowering: str) -> None:
    x = torch.randn(3, requires_grad=True)
    for function in (lambda x: x.exp(), functools.partial(torch.mul, torch.tensor(3.0))):
        planned = encore.compile(function, lowering=lowering)
        assert_same(run_step(planned, (x,)), run_step(function, (x,)), lowering)
        assert "has not run" not in str(encore.report(planned))


def test_a_function_over_a_module_trains_its_parameters() -> None:
    model, x, y = small_model(), torch.randn(5, 6), torch.randint(0, 3, (5,))

    @encore.compile(lowering="eager")
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loss(x, y).backward()
    have = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(have, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_module_is_compiled_in_place() -> None:
    model = small_model()
    keys, kind = list(model.state_dict()), type(model)
    assert encore.compile(model) is model
    assert list(model.state_dict()) == keys
    assert type(model) is kind


def test_compiling_again_replaces_the_plan(lowering: str) -> None:
    model, x = encore.compile(small_model(), resident=1, lowering=lowering), torch.randn(2, 6)
    model(x).sum().backward()
    before = encore.report(model).resident
    assert encore.compile(model, resident=1001, lowering=lowering) is model
    with pytest.raises(NeverRunError):
        encore.report(model)
    assert_verified(model, x)
    model(x).sum().backward()
    assert encore.report(model).resident == before + 1000


# -- budgets --------------------------------------------------------------------------------------------------------


def test_a_budget_below_the_floor_says_how_low_it_goes_and_what_pins_it(lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model, x = Model(), torch.randn(64, 6)
    expected = run_step(model, (x,))
    encore.compile(model, budget="1KiB", lowering=lowering)
    with pytest.raises(BudgetError) as caught:
        model(x)
    error = caught.value
    assert isinstance(error, EncoreError)
    assert error.floor > 1024
    assert str(error.floor) in str(error)
    assert error.pins
    assert all(pin.bytes > 0 and math.prod(pin.shape) > 0 and pin.name for pin in error.pins)
    assert any(Path(__file__).name in pin.source for pin in error.pins)
    assert error.remedies
    assert all(remedy in str(error) for remedy in error.remedies)
    with torch.no_grad():
        assert torch.equal(model(x), expected["output"])
    encore.compile(model, budget=error.floor, lowering=lowering)
    assert_same(run_step(model, (x,)), expected, lowering)
    rep = encore.report(model)
    assert rep.resident + rep.planned.step_peak <= error.floor


def test_a_refused_budget_is_refused_again_and_changes_nothing() -> None:
    model, x = encore.compile(small_model(), budget=1), torch.randn(4, 6)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(BudgetError):
            model(x)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(NeverRunError):
        encore.report(model)


def test_a_refused_function_raises_the_budget_error_itself() -> None:
    with pytest.raises(BudgetError):
        encore.compile(lambda x: x.exp().sin(), budget=8)(torch.randn(100, requires_grad=True))


@pytest.mark.parametrize("budget", [10**9, 1e9, "1GB", "1 GiB", "900MiB", "0.5gib", "100%", "100.0 %", "min", " MIN "])
def test_every_spelling_of_a_budget(budget: int | float | str, lowering: str) -> None:
    assert_verified(encore.compile(small_model(), budget=budget, lowering=lowering), torch.randn(2, 6))


def test_what_lives_beside_the_step_counts() -> None:
    model, x = small_model(), torch.randn(2, 6)
    optimizer = torch.optim.Adam(model.parameters())
    size = sum(parameter.nbytes for parameter in model.parameters())
    encore.compile(model)(x).sum().backward()
    alone = encore.report(model).resident
    encore.compile(model, optimizer=optimizer)(x).sum().backward()
    steps = 4 * len(list(model.parameters()))  # Adam counts in a float32 scalar for each parameter
    assert encore.report(model).resident == alone + 2 * size + steps


def test_an_estimate_with_the_wrong_arguments_says_so_in_one_line() -> None:
    message = refused(OptionError, lambda: encore.estimate(small_model(), torch.randn(2, 7)))
    assert "cannot be called with these arguments" in message


# -- refusals: one line each, with what is accepted ------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget",
    [0, -1, -1.5, 0.5, 0.0, True, False, math.nan, math.inf, "", "0", "0GiB", "-2GiB", "2 gigs", "two", "0%", "-5%",
     "%", "GiB", "1e9", "nan", "inf", [1], (2,), {}, b"2GiB", 1j, torch.tensor(5)],
    ids=repr,
)  # fmt: skip
def test_what_is_no_budget(budget: Any) -> None:
    message = refused(OptionError, lambda: encore.compile(small_model(), budget=budget))
    assert "budget=" in message
    assert all(accepted in message for accepted in ("bytes", "'2GiB'", "'60%'", "'min'"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"buget": 1}, ["'buget'", "'budget'", "'overhead'", "'lowering'", "'recompile_limit'"]),
        ({"budget": "1GiB", "overhead": 0.1}, ["budget=", "overhead=", "one of them"]),
        ({"overhead": -0.1}, ["overhead=-0.1", "0.05"]),
        ({"overhead": "5%"}, ["overhead='5%'", "0.05"]),
        ({"overhead": math.nan}, ["overhead=nan", "0.05"]),
        ({"overhead": True}, ["overhead=True", "0.05"]),
        ({"resident": -1}, ["resident=-1", "bytes"]),
        ({"resident": 1.5}, ["resident=1.5", "bytes"]),
        ({"recompile_limit": 0}, ["recompile_limit=0", "at least 1"]),
        ({"recompile_limit": 2.0}, ["recompile_limit=2.0", "at least 1"]),
        ({"lowering": "cuda"}, ["'cuda'", "'eager'"]),
        ({"lowering": 3}, ["3", "'eager'"]),
        ({"lowering": ["eager"]}, ["eager"]),
        ({"optimizer": "Adam"}, ["'Adam'", "torch.optim.Optimizer", "resident="]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_no_option(options: dict[str, Any], named: list[str]) -> None:
    message = refused(OptionError, lambda: encore.compile(small_model(), **options))
    assert all(part in message for part in named), message
    assert refused(OptionError, lambda: encore.compile(**options)) == message, "the decorator refuses at once"


@pytest.mark.parametrize(
    "thing", [3, "model", [nn.Linear(1, 1)], torch.zeros(2)], ids=lambda thing: type(thing).__name__
)
def test_what_cannot_be_called(thing: Any) -> None:
    message = refused(OptionError, lambda: encore.compile(thing))
    assert "module or a function" in message
    assert type(thing).__name__ in message


def test_a_module_with_nothing_to_train() -> None:
    message = refused(OptionError, lambda: encore.compile(small_model().requires_grad_(False)))
    assert "no trainable parameter" in message
    assert "unfreeze" in message
    assert "ReLU" in refused(OptionError, lambda: encore.compile(nn.ReLU()))


def test_a_refused_module_is_left_as_it_was() -> None:
    model, x = small_model(), torch.randn(2, 6)
    expected = run_step(model, (x,))
    refused(OptionError, lambda: encore.compile(model, budget=-1))
    assert "not compiled" in refused(NeverRunError, lambda: encore.report(model))
    assert_same(run_step(model, (x,)), expected, "eager")


def test_options_of_the_backend_are_checked_too() -> None:
    planned = torch.compile(small_model(), backend="encore", options={"buget": 1})
    with pytest.raises(OptionError, match=r"unknown option 'buget'.*'budget'"):
        planned(torch.randn(2, 6))


# -- asking too early ------------------------------------------------------------------------------------------------


def test_a_report_before_the_first_step() -> None:
    message = refused(NeverRunError, lambda: encore.report(encore.compile(small_model())))
    assert re.search("Sequential has not run.*encore.estimate", message)
    assert "has not run" in refused(NeverRunError, lambda: encore.report(encore.compile(scaled)))


@pytest.mark.parametrize("thing", [small_model(), scaled, len, 3, None], ids=lambda thing: type(thing).__name__)
def test_a_report_on_what_was_never_compiled(thing: Any) -> None:
    assert "encore.compile" in refused(NeverRunError, lambda: encore.report(thing))
    assert "encore.compile" in refused(OptionError, lambda: encore.verify(thing, torch.randn(2, 6)))


def test_verify_without_anything_to_differentiate() -> None:
    assert "gradient" in refused(
        OptionError, lambda: encore.verify(encore.compile(scaled), torch.ones(2), torch.ones(2))
    )
    assert "gradient" in refused(OptionError, lambda: encore.estimate(scaled, torch.ones(2), torch.ones(2)))


def test_a_report_is_text_and_json() -> None:
    model = encore.compile(small_model())
    model(torch.randn(2, 6)).sum().backward()
    rep = encore.report(model)
    assert json.loads(rep.to_json())["resident"] == rep.resident
    assert "Sequential" in str(rep)
    assert rep.planned.step_peak <= rep.unplanned.step_peak
