"""Steps that compute feature maps again: legal, exact, placed late, freed early; draws come out the same."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.fates import Recompute, recomputable
from encore.graph import Graph, OpClass, verify_graph
from encore.lower import lower
from encore.schedule import carry_out, replay, schedule_step, simulate
from support.captured_graphs import captured, drop_gradients, named, operators, train_step
from support.rounding import assert_close, assert_gradients_as_accurate

aten = torch.ops.aten


def gradients_of(graph: Graph, primals: Sequence[Any], tangents: Sequence[Any]) -> list[torch.Tensor | None]:
    lowered = lower(schedule_step(graph))
    outputs = lowered.forward([primal.detach() for primal in primals])
    saved = list(outputs[len(graph.outputs) :])
    return list(lowered.backward([*saved, *tangents]))


def recompute(graph: Graph, values: Iterable[int], *, exact: bool) -> Graph:
    return carry_out(graph, [Recompute(value) for value in values], exact=exact)


class Residual(nn.Module):
    """Norms, a draw, a branch and a view: something of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.leave = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.enter(x))
        hidden = hidden + self.drop(torch.sigmoid(self.norm(hidden)))
        wide = self.batch_norm(self.conv(hidden.transpose(1, 2))).relu()
        return self.leave(wide.transpose(1, 2).reshape(-1, 8)).logsumexp(1).sum()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_any_choice_of_values_gives_a_legal_step_whose_peak_the_replayer_confirms(seed: int, exact: bool) -> None:
    graph = captured(Residual(), torch.randn(2, 5, 6), overhead=0).unplanned.schedule.graph
    candidates = sorted(recomputable(graph))
    chosen = random.Random(seed).sample(candidates, k=max(1, len(candidates) * (seed % 4 + 1) // 4))
    again = recompute(graph, chosen, exact=exact)
    verify_graph(again)
    for view in (op for op in again.ops if op.kind is OpClass.VIEW):
        memory = {again.values[value].storage for value in view.reads}
        assert {again.values[value].storage for value in view.writes if value is not None} <= memory, view.name
    schedule = schedule_step(again)
    assert not {again.values[value].storage for value in chosen}.intersection(
        again.values[value].storage for value in schedule.saved
    )
    assert replay(schedule) == max(moment.peak for moment in simulate(schedule).moments if moment.phase != "end")


def test_a_view_that_backward_takes_of_a_copy_is_not_counted_beside_it() -> None:
    """The product's backward reads a transposed view of what is made again: one piece of memory, not two."""

    def step(x: torch.Tensor, weight: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return (torch.sin(torch.tanh(x @ weight)) @ head).sum()

    x = torch.randn(512, 64)
    weight, head = torch.randn(64, 64, requires_grad=True), torch.randn(64, 4, requires_grad=True)
    graph = captured(step, x, weight, head, overhead=0).unplanned.schedule.graph
    (sine,) = operators(graph, aten.sin)
    schedule = schedule_step(recompute(graph, [value for value in sine.writes if value is not None], exact=True))
    live = {schedule._aloud(moment.action): moment.live for moment in simulate(schedule).moments if moment.action}
    assert live["run t(sin_again_2)"] == live["run sin_again(tanh)"]


def test_nothing_dropped_is_nothing_changed() -> None:
    graph = captured(Residual(), torch.randn(2, 5, 6), overhead=0).unplanned.schedule.graph
    assert recompute(graph, (), exact=True) is graph


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.leave = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.sin(torch.tanh(self.enter(x)))).sum()


def test_a_copy_runs_right_before_its_reader_and_is_freed_right_after() -> None:
    graph = captured(Chain(), torch.randn(3, 4), overhead=0).unplanned.schedule.graph
    (sine,) = operators(graph, aten.sin)
    again = recompute(graph, [value for value in sine.writes if value is not None], exact=True)
    text = schedule_step(again).describe()
    backward = text[text.index("backward:") :].splitlines()
    (copy,) = [position for position, line in enumerate(backward) if "run sin_again" in line]
    assert "sin_again" in backward[copy + 1] or "sin_again" in backward[copy + 2]
    assert "sin" not in text[text.index("saved:") :].split(": ")[1].split(", ")
    assert len(operators(again, aten.addmm)) == len(operators(graph, aten.addmm)), "no product runs again"


def test_a_recomputed_draw_is_the_same_draw_and_leaves_the_generator_alone() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.dropout(x * 2, 0.5) * torch.tanh(x)).sum()

    x = torch.randn(64, 8, requires_grad=True)
    graph = captured(noisy, x, overhead=0).unplanned.schedule.graph
    (draw,) = [op for op in graph.ops if op.kind is OpClass.RANDOM]
    again = recompute(graph, [value for value in draw.writes if value is not None], exact=True)
    verify_graph(again)
    tangents = [torch.ones(())]
    torch.manual_seed(7)
    wanted = gradients_of(graph, [x], tangents)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    found = gradients_of(again, [x], tangents)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True) if a is not None and b is not None)
    saved = {again.values[value].name for value in schedule_step(again).saved}
    assert any(name.endswith("_state") for name in saved)
    assert named(graph, draw.name).name not in saved


@pytest.mark.parametrize("lowering", ["eager", "fused"])
def test_batch_norm_counts_once_and_dropout_draws_the_same(lowering: str) -> None:
    x = torch.randn(64, 5, 6)
    plain, planned = Residual(), Residual()
    planned.load_state_dict(plain.state_dict())
    compiled = encore.compile(planned, budget="min", lowering=lowering)
    for model in (plain, compiled):
        drop_gradients(model)
        torch.manual_seed(3)
        train_step(model, x)
    assert "recompute" in {row.action for row in encore.report(compiled).decisions}
    assert planned.batch_norm.num_batches_tracked is not None
    assert planned.batch_norm.num_batches_tracked.item() == 1
    for counted, expected in zip(planned.buffers(), plain.buffers(), strict=True):
        assert_close(counted.float(), expected.float())
    if lowering == "eager":
        for mine, its in zip(planned.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            assert torch.equal(mine.grad, its.grad)
    else:
        assert_gradients_as_accurate(planned, plain, train_step, x, seed=3)


def test_a_batch_norm_that_runs_twice_hands_its_statistics_on_and_runs_again() -> None:
    norm = nn.BatchNorm1d(8)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return norm(torch.tanh(norm(x))).tanh().sum()

    graph = captured(twice, torch.randn(6, 8, requires_grad=True), lowering="eager").unplanned.schedule.graph
    norms = operators(graph, torch.ops.aten._native_batch_norm_legit_functional.default)
    assert not recomputable(graph).intersection(value for op in norms for value in op.writes[3:] if value is not None)
    again = recompute(graph, recomputable(graph), exact=True)
    verify_graph(again)
    replay(schedule_step(again))
    assert len(norms) == 2
    assert len(operators(again, torch.ops.aten._native_batch_norm_legit.no_stats)) >= 1


def test_an_input_that_the_step_changes_is_not_read_again() -> None:
    def step(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        scaled = torch.tanh(x + counter)
        counter.add_(1)
        return (scaled * scaled).sum()

    x, counter = torch.randn(8, requires_grad=True), torch.ones(8)
    graph = captured(step, x, counter, overhead=0).unplanned.schedule.graph
    (addition, *_) = [op for op in operators(graph, aten.add) if op.forward]
    assert graph.mutated
    assert not recomputable(graph).intersection(value for value in addition.writes if value is not None)
