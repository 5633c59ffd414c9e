"""The rehearsal of a step of several calls: the first step is planned, nothing is planned twice, nothing is changed."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import encore
from encore.api import compiled_call
from encore.compiler.step import StepPlanner
from encore.errors import BudgetError
from support.cut_models import Block, CoinFlips, HookedBlocks, opaque, translate

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Memory block of unknown size.*:UserWarning"),
]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that are searched."""
    found: list[str] = []
    search = encore.compiler.pipeline.find_candidates

    def counted(forms: Any) -> Any:
        found.append(forms.captured.name)
        return search(forms)

    monkeypatch.setattr("encore.compiler.pipeline.find_candidates", counted)
    return found


def planner(model: Any) -> StepPlanner:
    return compiled_call(model).session.step


class Noisy(nn.Module):
    """A model whose Python has effects, and which draws from all generators."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 32), nn.Linear(32, 4), nn.BatchNorm1d(32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.count = 0
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls += 1
        y = nn.functional.dropout(self.norm(self.first(x)), 0.5)
        self.plainly(y)
        return self.second(y * random.choice((0.5, 2.0))).square().mean()

    @torch.compiler.disable
    def plainly(self, y: torch.Tensor) -> None:
        print("drawn", float(np.random.rand()) >= 0)
        warnings.warn("of the model's own", stacklevel=1)
        self.seen.append(tuple(y.shape))
        torch.rand(3)


def hooked() -> tuple[Noisy, list[str]]:
    torch.manual_seed(0)
    model, heard = Noisy(), list[str]()

    @torch.compiler.disable
    def hook(module: nn.Module, args: Any) -> None:
        heard.append(type(module).__name__)

    def gradient_hook(gradient: torch.Tensor) -> None:
        heard.append("gradient")

    model.second.register_forward_pre_hook(hook)
    model.first.weight.register_hook(gradient_hook)
    return model, heard


def run_noisy(model: Any, steps: int = 3) -> list[torch.Tensor]:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    x = torch.randn(64, 16)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_rehearsal_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    results: list[Any] = []
    for compiled in (False, True):
        model, heard = hooked()
        if compiled:
            encore.compile(model, budget="100%", lowering="eager")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            gradients = run_noisy(model)
        own = [one for one in warned if "of the model's own" in str(one.message)]
        printed = capsys.readouterr()
        drawn = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
        results.append((heard, model.count, model.seen, len(own), printed.out, printed.err, drawn))
        values = [*gradients, *(one.clone() for one in model.state_dict().values())]
        results.append(values)
    assert results[2] == results[0]
    assert all(torch.equal(mine, its) for mine, its in zip(results[3], results[1], strict=True))
    assert planner(model).rehearsed is not None
    assert not [one for one in warned if "more than its budget" in str(one.message)]


def test_the_first_step_runs_as_planned_and_nothing_is_searched_twice(searches: list[str]) -> None:
    model, x = HookedBlocks(), torch.randn(8, 32, 32)
    encore.compile(model, budget="60%", lowering="eager")
    model(x).backward()
    calls = [call.captured for call in planner(model).calls]
    (program,) = planner(model).programs.values()
    assert calls == [variant.captured for variant in program.variants]
    assert program.shared is not None
    assert program.limit == int(0.6 * (program.unplanned + program.resident))
    assert program.shared.step_peak + program.resident <= program.limit
    assert len(calls) == 5
    assert encore.report(model).planned.step_peak == program.shared.step_peak
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        model(x).backward()
    planner(model).begin()
    assert program.settled
    assert program.observed == program.shared.step_peak
    assert [variant.captured for variant in program.variants] == calls, "the plans stay"
    assert sorted(searches) == ["graph 0", "graph 1"]


@pytest.mark.slow
def test_a_loop_with_coin_flips_is_searched_once(searches: list[str]) -> None:
    torch.manual_seed(0)
    source, target = torch.randint(64, (16, 40)), torch.randint(64, (16, 9))
    model = encore.compile(CoinFlips(), budget="60%", lowering="eager")
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        translate(model, source, target)
    assert planner(model).last is not None
    assert len(searches) == len(set(searches)) == 2


def test_a_budget_that_is_impossible_is_refused_before_anything_runs() -> None:
    model, heard = hooked()
    x = torch.randn(64, 16)
    torch.manual_seed(9)
    drawn = torch.get_rng_state()
    encore.compile(model, budget=20_000, lowering="eager")
    with pytest.raises(BudgetError, match=r"of this step of \d+ calls of \d+ graphs") as raised:
        model(x)
    assert not heard
    assert model.count <= 1, "Python before the first graph has run"
    assert int(model.calls) == 0
    assert model.norm.num_batches_tracked is not None
    assert int(model.norm.num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), drawn)
    torch._dynamo.reset()
    model, _ = hooked()
    encore.compile(model, budget=raised.value.floor, lowering="eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run_noisy(model)
    assert not [one for one in warned if "budget" in str(one.message)]


def test_what_depends_on_data_is_learned_from_steps(caplog: pytest.LogCaptureFixture) -> None:
    class Branching(HookedBlocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x) if x.sum().item() < 1e9 else x
            return self.head(x).square().mean()

    model, x = Branching(), torch.randn(8, 32, 32)
    encore.compile(model, budget="60%", lowering="eager")
    with caplog.at_level(logging.INFO, "encore"):
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            model(x).backward()
    planner(model).begin()
    assert "cannot be rehearsed" in caplog.text
    assert planner(model).rehearsed is None
    assert planner(model).last is not None
    assert caplog.text.count("cannot be rehearsed") == 1


class Uncopyable(HookedBlocks):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


def of_this_file(x: torch.Tensor) -> torch.Tensor:
    return SHARED(x)


SHARED = HookedBlocks()


@pytest.mark.parametrize("make", [Uncopyable, pytest.param(lambda: of_this_file, marks=pytest.mark.slow)])
def test_what_has_no_twin_is_learned_from_steps(make: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(8, 32, 32)
    model = encore.compile(make(), budget="60%", lowering="eager")
    with caplog.at_level(logging.INFO, "encore"):
        for _ in range(3):
            model(x).backward()
    assert "cannot be rehearsed" in caplog.text
    assert planner(model).last is not None or planner(model).calls


def test_a_function_is_rehearsed_with_what_it_closes_over() -> None:
    plain, x = HookedBlocks(), torch.randn(8, 32, 32)
    module = copy.deepcopy(plain)
    losses: list[float] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        found = module(x)
        losses.append(found.detach())
        return found

    compiled = encore.compile(loss, budget="60%", lowering="eager")
    compiled(x).backward()
    plain(x).backward()
    assert planner(compiled).rehearsed is not None
    assert len(losses) == 1
    for mine, its in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


@pytest.mark.slow
def test_new_shapes_are_rehearsed_anew() -> None:
    model = encore.compile(HookedBlocks(), budget="60%", lowering="eager")
    for rows in (4, 8):
        x = torch.randn(rows, 32, 32)
        model.zero_grad(set_to_none=True)
        model(x).backward()
        *_, program = planner(model).programs.values()
        assert [call.captured for call in planner(model).calls] == [one.captured for one in program.variants]
    assert len(planner(model).programs) == 2


class Counting(nn.Module):
    """A part that cannot run a second time: it reads a buffer that it changes. One output is not used."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("state", torch.ones(()))
        self.register_forward_pre_hook(opaque)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.linear(x)) + self.state
        self.state.add_(1)
        return y, y.sigmoid()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Counting() for _ in range(3))
        self.register_forward_pre_hook(opaque)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x, _ = part(x)
        return x.square().mean()


def test_graphs_that_cannot_run_again_take_every_gradient() -> None:
    torch.manual_seed(0)
    plain, x = Counted(), torch.randn(64, 16)
    model = encore.compile(copy.deepcopy(plain), budget="min", lowering="eager")
    for _ in range(3):
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
            one(x).backward()
        assert planner(model).rehearsed is not None
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            assert torch.equal(mine.grad, its.grad)
    assert all(torch.equal(mine, its) for mine, its in zip(model.buffers(), plain.buffers(), strict=True))
    model(x)
    calls = [call for call in planner(model).calls if not call.runner.is_whole]
    assert {call.runner.tangents.optional for call in calls if len(call.runner.tangents.everything) > 1} == {False}


def test_one_graph_is_not_rehearsed() -> None:
    model = encore.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="min", lowering="eager")
    model(torch.randn(4, 8)).sum().backward()
    assert planner(model).rehearsed is None


@pytest.mark.slow
def test_tied_and_frozen_parameters_are_the_same_graphs(searches: list[str]) -> None:
    model, x = HookedBlocks(blocks=3), torch.randn(8, 32, 32)
    tied, other, frozen = (module for module in model.modules() if isinstance(module, Block))
    other.up.weight = tied.up.weight
    frozen.down.weight.requires_grad_(False)
    model.head.register_forward_pre_hook(opaque)
    plain = copy.deepcopy(model)
    encore.compile(model, budget="60%", lowering="eager")
    for _ in range(4):
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
            one(x).backward()
    assert len(searches) == len(set(searches))
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        assert mine.grad is None or its.grad is None or torch.equal(mine.grad, its.grad)
