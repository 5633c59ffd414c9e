"""Estimates of steps of several calls: of the whole step, and what the running step comes to."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from encore.api import compiled_call, estimate_with
from encore.errors import BudgetError, OptionError
from encore.options import make_options
from support.cut_models import WORDS, CoinFlips, HookedBlocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Memory block of unknown size.*:UserWarning"),
]

Case = tuple[nn.Module, tuple[torch.Tensor, ...]]


class CoinFlipsWithLoss(nn.Module):
    """A loop with coin flips, and the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CoinFlips()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        written = self.inner(source, target)
        return F.cross_entropy(written.reshape(-1, WORDS), target.t()[1:].reshape(-1))


class Printing(nn.Module):
    """Two graphs, of which the second reads the output of the first twice, with plain code between them."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Tanh()) for _ in range(4))
        self.first, self.second = nn.Sequential(*layers), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return (self.second(y).sigmoid() + y.mean()).square().mean()


def blocks() -> Case:
    return HookedBlocks(), (torch.randn(8, 32, 32),)


def coin_flips() -> Case:
    return CoinFlipsWithLoss(), (torch.randint(WORDS, (16, 40)), torch.randint(WORDS, (16, 6)))


def printing() -> Case:
    return Printing(), (torch.randn(256, 32),)


def gpt2() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0
    )

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=words, labels=words).loss
            return loss

    return WithLoss(), (torch.randint(256, (4, 32)),)


def step(model: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    model.zero_grad(set_to_none=True)
    random.seed(3)
    torch.manual_seed(3)
    model(*args).backward()


def settled_peaks(model: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """The predicted and the measured peak of a step once its plans stay."""
    for _ in range(4):
        step(model, args)
    model.zero_grad(set_to_none=True)
    measured = encore.measure(functools.partial(step, model, args)).step_peak
    return encore.report(model).planned.step_peak, measured


@pytest.mark.parametrize(
    ("make", "lowering", "near"),
    [
        (blocks, "eager", 0.0),
        (printing, "eager", 0.0),
        pytest.param(coin_flips, "eager", 0.02, marks=pytest.mark.slow),
        pytest.param(blocks, "fused", 0.02, marks=pytest.mark.slow),
    ],
)
def test_an_estimate_is_what_the_settled_step_takes(make: Callable[[], Case], lowering: str, near: float) -> None:
    torch.manual_seed(0)
    plain, args = make()
    options = make_options({"lowering": lowering})
    for budget in ("60%", "min"):
        torch._dynamo.reset()
        model = encore.compile(copy.deepcopy(plain), budget=budget, lowering=lowering)
        predicted, measured = settled_peaks(model, args)
        estimate = estimate_with(options, plain, args, {})  # with what was measured for the compiled one
        planned = estimate.plan(budget)
        assert abs(planned.planned.step_peak - predicted) <= near * predicted
        assert measured <= predicted <= (1 + max(near, 0.001)) * measured
        assert len(planned.graphs) == len(compiled_call(model).session.last_step)
    step(plain, args)
    plain.zero_grad(set_to_none=True)
    eager = encore.measure(functools.partial(step, plain, args)).step_peak
    assert abs(estimate.unplanned.step_peak - eager) <= 0.01 * eager


@pytest.mark.slow
def test_an_estimate_of_gpt2_is_what_its_settled_step_takes() -> None:
    torch.manual_seed(0)
    plain, args = gpt2()
    model = encore.compile(copy.deepcopy(plain), budget="60%", lowering="eager", methods=("recompute",))
    predicted, measured = settled_peaks(model, args)
    options = make_options({"lowering": "eager", "methods": ("recompute",)})
    assert estimate_with(options, plain, args, {}).plan("60%").planned.step_peak == predicted
    assert measured <= predicted <= 1.02 * measured


def test_floor_front_and_plans_speak_of_the_whole_step() -> None:
    plain, args = blocks()
    options = make_options({"lowering": "eager"})
    estimate = estimate_with(options, plain, args, {})
    totals = [total for total, _ in estimate.pareto]
    overheads = [overhead for _, overhead in estimate.pareto]
    assert totals == sorted(totals, reverse=True)
    assert overheads == sorted(overheads)
    assert estimate.floor == totals[-1]
    assert estimate.fits(estimate.floor)
    assert not estimate.fits(estimate.floor - 1)
    assert estimate.fits("min")
    with pytest.raises(BudgetError, match="of this step of 5 calls of 2 graphs") as raised:
        estimate.plan(estimate.floor - 1)
    assert raised.value.floor == estimate.floor
    report = estimate.plan(estimate.floor)
    assert report.resident + report.planned.step_peak == estimate.floor
    whole = estimate.unplanned.step_peak + estimate.resident
    assert estimate.plan("60%").budget == int(0.6 * whole)
    more = estimate.beside(resident=1000)
    assert more.floor == estimate.floor + 1000
    assert more.resident == estimate.resident + 1000
    assert overheads[0] >= 0


def test_a_loss_outside_of_the_model_is_noted() -> None:
    plain, args = CoinFlips(), (torch.randint(WORDS, (16, 40)), torch.randint(WORDS, (16, 5)))
    noted = str(encore.estimate(plain, *args))
    assert "the loss is outside of the model" in noted
    model, batch = blocks()
    assert "the loss is outside" not in str(encore.estimate(model, *batch))


def test_an_estimate_changes_nothing() -> None:
    plain, args = coin_flips()
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    state = copy.deepcopy(plain.state_dict())
    encore.estimate(plain, *args)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(parameter.grad is None for parameter in plain.parameters())
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_a_function_keeps_its_parameters_as_they_are() -> None:
    model, (x,) = blocks()
    other = HookedBlocks(blocks=1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x) + in_this_file(x)

    global in_this_file
    in_this_file = other
    estimate = encore.estimate(loss, x)
    assert len(estimate.report.graphs) > 2
    assert all(parameter.grad is None for one in (model, other) for parameter in one.parameters())


in_this_file: nn.Module = nn.Identity()


def test_a_step_that_depends_on_data_is_an_error() -> None:
    class Branching(Printing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.first(x))
            return self.second(y).mean() if y.sum().item() > 0 else y.mean()

    with pytest.raises(OptionError, match="depends on data"):
        encore.estimate(Branching(), torch.randn(4, 32))
