"""One budget for a step of several calls: kept, predicted, exact, and an error or a warning where it cannot be kept."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import encore
from encore.api import compiled_call
from encore.compiler.step_calls import Program
from encore.errors import BudgetError
from support.cut_models import WORDS, CoinFlips, HookedBlocks, opaque, translate
from support.rounding import assert_gradients_as_accurate

SETTLED = 4
"""Steps after which the plans of a program stay."""

Step = Callable[[nn.Module], object]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Memory block of unknown size.*:UserWarning"),
]


def as_model(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The batch in the type of a model."""
    return x.to(next(model.parameters()).dtype)


def blocks() -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    x = torch.randn(8, 32, 32)
    return HookedBlocks(), lambda model: model(as_model(x, model)).backward()


def coin_flips(words: int = 9) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    source, target = torch.randint(WORDS, (16, 40)), torch.randint(WORDS, (16, words))
    return CoinFlips(), lambda model: translate(model, source, target)


def peak(model: nn.Module, step: Step) -> int:
    model.zero_grad(set_to_none=True)
    return encore.measure(functools.partial(step, model)).step_peak


def settle(model: nn.Module, step: Step, steps: int = SETTLED) -> Program:
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        step(model)
    compiled_call(model).session.step.begin()
    program = compiled_call(model).session.step.last
    assert program is not None
    assert program.settled
    return program


def assert_equal_gradients(model: nn.Module, plain: nn.Module, step: Step) -> None:
    for one in (model, plain):
        one.zero_grad(set_to_none=True)
        step(one)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        assert mine.grad is None or its.grad is None or torch.equal(mine.grad, its.grad)


def assert_as_accurate_gradients(model: nn.Module, plain: nn.Module, step: Step) -> None:
    for one in (model, plain):
        one.zero_grad(set_to_none=True)
        step(one)
    assert_gradients_as_accurate(model, plain, step)


@pytest.mark.parametrize("make", [blocks, coin_flips])
def test_budgets_hold_for_the_whole_step_and_are_predicted(make: Callable[[], tuple[nn.Module, Step]]) -> None:
    plain, step = make()
    peak(plain, step)
    eager = peak(plain, step)
    peaks = []
    for budget in ("60%", "min"):
        torch._dynamo.reset()
        model = encore.compile(copy.deepcopy(plain), budget=budget, lowering="eager")
        program = settle(model, step)
        assert program.shared is not None
        measured = peak(model, step)
        peaks.append(measured)
        assert abs(measured - program.shared.step_peak) <= 0.01 * measured
        assert program.limit is None or measured + program.resident <= program.limit
        assert measured < eager
        if make is blocks:  # values that several graphs read get their gradients added in another order
            assert_equal_gradients(model, plain, step)
        assert_as_accurate_gradients(model, plain, step)
        assert encore.report(model).planned.step_peak == program.shared.step_peak
    assert peaks == sorted(peaks, reverse=True)


def test_a_budget_below_the_lowest_peak_is_an_error_that_names_it() -> None:
    plain, step = blocks()
    model = encore.compile(copy.deepcopy(plain), budget=200_000, lowering="eager")
    with pytest.raises(BudgetError, match="of this step of 5 calls of 2 graphs") as raised:
        step(model)
    torch._dynamo.reset()
    model = encore.compile(copy.deepcopy(plain), budget=raised.value.floor, lowering="eager")
    program = settle(model, step)
    assert peak(model, step) + program.resident <= raised.value.floor


def test_errors_of_a_step_that_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encore.compiler.step.StepPlanner.rehearse", lambda planner: None)
    plain, step = blocks()
    model = encore.compile(copy.deepcopy(plain), budget=200_000, lowering="eager")
    with pytest.raises(BudgetError, match="of one call of graph 0 alone"):
        step(model)
    torch._dynamo.reset()
    model = encore.compile(copy.deepcopy(plain), budget=500_000, lowering="eager")
    with pytest.raises(BudgetError, match="of this step of 5 calls of 2 graphs") as raised:
        settle(model, step)
    torch._dynamo.reset()
    model = encore.compile(copy.deepcopy(plain), budget=raised.value.floor, lowering="eager")
    program = settle(model, step)
    assert peak(model, step) + program.resident <= raised.value.floor


def test_plain_code_that_exceeds_the_budget_is_warned_of_once() -> None:
    model, _ = blocks()

    def in_between(model: nn.Module) -> None:
        loss = model(torch.ones(8, 32, 32))
        torch.empty(50_000_000, dtype=torch.uint8)
        loss.backward()

    encore.compile(model, budget="4MiB", lowering="eager")
    with pytest.warns(UserWarning, match="code outside of the captured graphs") as warned:
        settle(model, in_between, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settle(model, in_between, 8)
    assert len([one for one in warned if "more than its budget" in str(one.message)]) == 1


def test_a_longer_loop_is_a_program_of_its_own() -> None:
    plain, short = coin_flips(5)
    _, long = coin_flips(12)
    model = encore.compile(copy.deepcopy(plain), budget="70%", lowering="eager")
    first = settle(model, short)
    second = settle(model, long)
    assert (len(first.calls), len(second.calls)) == (5, 12)
    assert second.limit is not None
    assert peak(model, long) + second.resident <= second.limit
    assert peak(model, short) + first.resident <= second.limit
    assert_as_accurate_gradients(model, plain, long)


def test_forwards_whose_backward_never_comes_are_no_calls_of_the_step() -> None:
    plain, step = blocks()
    model = encore.compile(copy.deepcopy(plain), budget="60%", lowering="eager")

    def with_evaluation(model: nn.Module) -> None:
        model(torch.randn(8, 32, 32))
        with torch.no_grad():
            model(torch.randn(8, 32, 32))
        step(model)

    program = settle(model, with_evaluation, steps=6)
    assert len(program.calls) == 5
    assert_equal_gradients(model, plain, with_evaluation)


def test_a_step_that_is_given_up_is_no_step() -> None:
    plain, step = blocks()
    model = encore.compile(copy.deepcopy(plain), budget="60%", lowering="eager")

    def interrupted(model: nn.Module) -> None:
        with pytest.raises(ZeroDivisionError):
            1 / (0 * len(model(torch.randn(8, 32, 32)).shape))
        step(model)

    program = settle(model, interrupted, steps=6)
    assert len(program.calls) == 5
    assert program.observed is not None
    encore.measure(functools.partial(step, model))  # no profiler is left running


def test_several_forwards_before_backward_share_the_budget() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()) for _ in range(6)))
    batches = [torch.randn(256, 64) for _ in range(3)]

    def step(model: nn.Module) -> None:
        sum(model(as_model(x, model)).square().mean() for x in batches).backward()  # type: ignore[union-attr]

    peak(plain, step)
    eager = peak(plain, step)
    model = encore.compile(copy.deepcopy(plain), budget="75%", lowering="eager")
    program = settle(model, step, steps=6)
    assert len(program.calls) == 3
    measured = peak(model, step)
    assert program.limit is not None
    assert measured + program.resident <= program.limit
    assert measured < 0.85 * eager
    assert_equal_gradients(model, plain, step)


class Program3(nn.Module):
    """Calls of a few small modules in a drawn order, with breaks between them and values that are read again."""

    def __init__(self, calls: list[tuple[int, int]]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16 * (n + 1)), nn.GELU(), nn.Linear(16 * (n + 1), 16)) for n in range(3)
        )
        for part in self.parts:
            part.register_forward_pre_hook(opaque)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for part, operand in self.calls:
            seen.append(seen[-1] + self.parts[part](seen[operand % len(seen)]))
        return seen[-1].square().mean() + seen[len(seen) // 2].mean()


class Pair(nn.Module):
    """A part with an output that receives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_forward_pre_hook(opaque)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.linear(x))
        return y, y.sigmoid()


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Pair() for _ in range(3))
        self.register_forward_pre_hook(opaque)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x, _ = part(x)
        return x.square().mean()


@pytest.mark.parametrize("optional", [True, False])
def test_graphs_that_cannot_be_cut_down_are_planned_for_every_gradient(
    monkeypatch: pytest.MonkeyPatch, *, optional: bool
) -> None:
    monkeypatch.setattr("encore.compiler.step.StepPlanner.rehearse", lambda planner: None)
    x = torch.randn(64, 16)
    model = encore.compile(Pairs(), budget="min", lowering="eager")

    def step(model: nn.Module) -> None:
        model(x).backward()

    step(model)
    runners = {call.runner for call in compiled_call(model).session.step.calls}
    for runner in runners if not optional else ():
        runner.tangents.require_all()
    program = settle(model, step)
    assert all(len(runner.tangents.everything) == 2 for runner in runners)
    assert {len(variant.used) for variant in program.variants} == ({1} if optional else {2})


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=2, max_size=8),
    st.sampled_from(["40%", "70%", "min"]),
    st.sampled_from(["eager", "fused"]),
)
def test_random_programs_keep_their_budgets(calls: list[tuple[int, int]], budget: str, lowering: str) -> None:
    torch._dynamo.reset()
    plain, x = Program3(calls), torch.randn(128, 16)

    def step(model: nn.Module) -> None:
        model(as_model(x, model)).backward()

    model = encore.compile(copy.deepcopy(plain), budget=budget, lowering=lowering)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            program = settle(model, step, 8)
        except BudgetError as error:
            assert budget != "min"
            torch._dynamo.reset()
            model = encore.compile(copy.deepcopy(plain), budget=error.floor, lowering=lowering)
            program = settle(model, step, 8)
    exceeded = any("code outside of the captured graphs keeps" in str(one.message) for one in warned)
    assert program.shared is not None
    measured = peak(model, step)
    assert measured <= 1.01 * program.shared.step_peak
    assert exceeded or program.limit is None or measured + program.resident <= program.limit
    assert_as_accurate_gradients(model, plain, step)


def test_settled_lengths_are_not_observed_because_others_are_not() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x).tanh().exp()
            torch._dynamo.graph_break()
            return self.layers[1](x).tanh().exp().sum()

    model = encore.compile(Broken(), budget="1GiB", lowering="eager")
    planner = compiled_call(model).session.step

    def step(rows: int) -> bool:
        """Run a step; return whether it was observed when its backward began."""
        loss = model(torch.randn(rows, 16))
        observed = planner._observation is not None
        loss.backward()
        return observed

    for _ in range(SETTLED):
        step(64)
    step(32)  # a program that is not settled
    while planner.measured.steps & (planner.measured.steps + 1) or planner.measured.steps < 16:  # powers of two are due
        step(64)
    assert any(program.variants and not program.settled for program in planner.programs.values())
    step(64)
    assert [step(64) for _ in range(3)] == [False] * 3
    assert step(32)
    assert len(planner.programs) == 2  # also the second length runs the plans of its rehearsal
