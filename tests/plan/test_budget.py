"""Which plan a budget picks, and how a budget that cannot be met is refused."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn

import encore
from encore.fates import Keep
from encore.options import Budget, Options
from encore.plan import Candidate, Plan, choose, keep_everything, keeps_budget
from support.captured_graphs import Perceptron, captured


@functools.cache
def unplanned() -> Plan:
    torch._dynamo.reset()
    return captured(Perceptron(), torch.randn(3, 4)).plan


def plan(name: str, step_peak: int, overhead: float) -> Plan:
    """The perceptron's plan, with another peak and another price."""
    timeline = unplanned().timeline
    worst = timeline.moments[timeline.worst]._replace(peak=step_peak)
    others = [moment._replace(peak=0) for moment in timeline.moments]
    others[timeline.worst] = worst
    return dataclasses.replace(
        unplanned(), name=name, overhead=overhead, timeline=dataclasses.replace(timeline, moments=tuple(others))
    )


def some_candidates() -> list[Candidate]:
    plans = [plan("all kept", 1000, 0.0), plan("some", 600, 0.04), plan("more", 500, 0.04), plan("least", 200, 0.5)]
    return [Candidate.of(one) for one in plans]


RESIDENT = 280


def test_the_resident_bytes_are_those_of_parameters_and_inputs() -> None:
    assert unplanned().timeline.resident == RESIDENT


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (Options(), "more"),
        (Options(overhead=0.0), "all kept"),
        (Options(overhead=1.0), "least"),
        (Options(budget=Budget(bytes=RESIDENT + 1000)), "all kept"),
        (Options(budget=Budget(bytes=RESIDENT + 999)), "more"),
        (Options(budget=Budget(bytes=RESIDENT + 500)), "more"),
        (Options(budget=Budget(bytes=RESIDENT + 499)), "least"),
        (Options(budget=Budget(bytes=RESIDENT + 200)), "least"),
        (Options(budget=Budget()), "least"),
        (Options(budget=Budget(share=1.0)), "all kept"),
        (Options(budget=Budget(share=0.61)), "more"),
        (Options(budget=Budget(bytes=RESIDENT + 1000), resident=1), "more"),
        (Options(budget=Budget(bytes=RESIDENT + 1100), resident=100), "all kept"),
    ],
)
def test_the_fastest_that_fits_or_the_smallest_that_is_fast_enough(options: Options, chosen: str) -> None:
    assert choose(some_candidates(), options).plan.name == chosen


def test_a_larger_budget_is_never_slower_and_a_smaller_one_never_higher() -> None:
    picked = [
        choose(some_candidates(), Options(budget=Budget(bytes=RESIDENT + size))).plan for size in range(200, 1101, 50)
    ]
    overheads = [plan.overhead for plan in picked]
    peaks = [plan.timeline.step_peak for plan in picked]
    assert overheads == sorted(overheads, reverse=True)
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("budget", [Budget(bytes=RESIDENT + 600), Budget(share=(RESIDENT + 600) / (RESIDENT + 1000))])
def test_a_plan_that_came_out_larger_is_held_against_the_budget_again(budget: Budget) -> None:
    unplanned, options = some_candidates()[0].plan, Options(budget=budget)
    assert keeps_budget(plan("as offered", 600, 0.1), options, unplanned=unplanned)
    assert not keeps_budget(plan("a byte more", 601, 0.1), options, unplanned=unplanned)
    assert keeps_budget(plan("no bound", 10_000, 0.1), Options(budget=Budget()), unplanned=unplanned)


def test_a_share_is_one_of_the_step_that_nobody_planned() -> None:
    options, unplanned = Options(budget=Budget(share=0.5)), plan("unplanned", 2 * (RESIDENT + 1000) - RESIDENT, 0.0)
    assert choose(some_candidates(), options, unplanned=unplanned).plan.timeline.step_peak == 1000
    assert choose(some_candidates(), options).plan.timeline.step_peak < 1000


def test_a_byte_below_the_floor_is_refused_with_the_floor() -> None:
    with pytest.raises(encore.BudgetError) as refused:
        choose(some_candidates(), Options(budget=Budget(bytes=RESIDENT + 199)))
    assert refused.value.floor == RESIDENT + 200


def test_keeping_everything_decides_on_feature_maps_alone() -> None:
    graph = unplanned().schedule.graph
    kept = keep_everything(graph, lambda graph, op: 0)
    assert kept.name == "keep everything"
    assert kept.overhead == 0.0
    ((value, decision),) = kept.decisions.items()
    assert graph.values[value].name == "relu"
    assert (decision.fate, decision.seconds, decision.held) == (Keep(value), 0.0, graph.bytes_of(value))
    assert decision.fate.kind == "keep"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.first(x))
        return self.second(wide).sum()


def bytes_needed(x: torch.Tensor) -> int:
    """The least resident + step_peak of a step, told after it ran."""
    model = encore.compile(Wide(), lowering="eager", budget="min")
    model(x).backward()
    report = encore.report(model)
    return report.resident + report.planned.step_peak


def test_a_refusal_says_how_low_it_goes_what_is_in_the_way_and_what_helps() -> None:
    x = torch.randn(64, 8)
    needed = bytes_needed(x)
    model = encore.compile(Wide(), budget=needed - 1, lowering="eager")
    with pytest.raises(encore.BudgetError) as refused:
        model(x)
    error = refused.value
    assert error.floor == needed
    message = str(error)
    assert message.startswith(f"a budget of {needed - 1} bytes (")
    assert f"the lowest reachable peak is {needed} bytes" in message
    assert error.remedies[0].startswith(f"raise the budget to {needed} bytes")
    assert all(remedy in message for remedy in error.remedies)
    assert 1 <= len(error.pins) <= 5
    assert [pin.bytes for pin in error.pins] == sorted((pin.bytes for pin in error.pins), reverse=True)
    for pin in error.pins:
        assert f"{pin.name} {list(pin.shape)}" in message
        assert f"{pin.module} {pin.source}" in message
        assert pin.source.startswith("test_budget.py:") or pin.name.startswith("tangents_")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_pin_is_named_after_what_its_memory_holds() -> None:
    """tanh writes over the linear layer's result: at the peak the block is the tanh, not what it was before."""
    with pytest.raises(encore.BudgetError) as refused:
        encore.compile(Wide(), budget=1, lowering="eager")(torch.randn(64, 8))
    names = [pin.name for pin in refused.value.pins]
    assert "tanh" in names
    assert "addmm" not in names


def test_a_refused_model_trains_once_the_budget_is_met() -> None:
    x = torch.randn(64, 8)
    model = Wide()
    needed = bytes_needed(x)
    assert encore.estimate(model, x).floor == needed
    with pytest.raises(encore.BudgetError):
        encore.compile(model, budget=needed - 1, lowering="eager")(x)
    encore.compile(model, budget=needed, lowering="eager")
    model(x).backward()
    assert encore.report(model).resident + encore.report(model).planned.step_peak == needed
    assert encore.report(model).planned.overhead == 0.0
