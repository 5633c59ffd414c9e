"""The definition of the gradient error, and runs that are repeated without a trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from encore.cost.gradient_error import (
    compare_gradients,
    lower_in_memory,
    random_tangents,
    run_gradients,
    why_unmeasurable,
)
from encore.fates import Encode
from encore.graph import Graph, Role, Value
from encore.graph.values import Op
from encore.schedule import carry_out, schedule_step
from support.captured_graphs import captured


def primals(*roles: Role) -> Graph:
    values = [Value(number, "", None, (), (), None, 0, None, role) for number, role in enumerate(roles)]
    return Graph(values, [], [], list(range(len(roles))), [], [], list(range(len(roles))))


def test_parameters_are_one_vector_and_inputs_another() -> None:
    graph = primals(Role.PARAMETER, Role.PARAMETER, Role.INPUT, Role.BUFFER)
    exact = [torch.tensor([3.0, 0.0]), torch.tensor([4.0]), torch.tensor([1.0]), None]
    lossy = [torch.tensor([3.0, 0.3]), torch.tensor([4.4]), torch.tensor([1.01]), None]
    found = compare_gradients(graph, exact, lossy)
    assert found.relative == pytest.approx(0.5 / 5)
    assert found.largest == pytest.approx(0.1)
    assert compare_gradients(graph, exact, [*lossy[:2], torch.tensor([1.5]), None]).relative == pytest.approx(0.5)


def test_what_is_not_finite_is_no_small_error() -> None:
    graph = primals(Role.PARAMETER)
    one, zero, bad = torch.ones(2), torch.zeros(2), torch.tensor([1.0, math.nan])
    assert compare_gradients(graph, [one], [bad]).relative == math.inf
    assert math.isnan(compare_gradients(graph, [bad], [bad]).relative)
    assert compare_gradients(graph, [zero], [zero]).relative == 0
    assert compare_gradients(graph, [zero], [one]).relative == math.inf


def test_parameters_with_a_negligible_gradient_do_not_count_by_themselves() -> None:
    graph = primals(Role.PARAMETER, Role.PARAMETER)
    found = compare_gradients(
        graph, [torch.ones(4), torch.full((4,), 1e-9)], [torch.ones(4) * 1.01, torch.ones(4) * 1e-6]
    )
    assert found.relative == pytest.approx(0.01, rel=1e-4)
    assert found.largest == pytest.approx(0.01, rel=1e-4)


class Dropping(nn.Module):
    """Draws a mask and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(nn.functional.dropout(torch.tanh(self.norm(self.enter(x))), 0.3)).mean()


def test_runs_have_the_same_draws_and_leave_no_trace() -> None:
    model, x = Dropping(), torch.randn(32, 16)
    graph = captured(model, x).unplanned.schedule.graph
    by_shape = {tuple(one.shape): one.detach() for one in (*model.parameters(), *model.buffers(), x)}
    given = [by_shape[graph.values[value].shape] for value in graph.primals]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    (hidden,) = [op.writes[0] for op in graph.ops if "tanh" in str(op.target) and op.forward]
    assert hidden is not None
    size = 32 * 64 * 2
    schedule = schedule_step(carry_out(graph, [Encode(hidden, "fp16", size)], exact=True))
    tangents = random_tangents(graph)
    assert [float(tangent) for tangent in tangents] == [1.0]
    state = torch.get_rng_state()

    def run(*, exact: bool) -> list[torch.Tensor | None]:
        return run_gradients(schedule.graph, lower_in_memory(schedule, exact=exact), given, tangents)

    kept = schedule_step(graph)
    truth = run_gradients(graph, lower_in_memory(kept, exact=True), given, tangents)
    assert compare_gradients(graph, truth, run(exact=True)).relative == 0
    assert 0 < compare_gradients(graph, truth, run(exact=False)).relative < 1e-3
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_steps_that_may_not_run_twice_are_not_measured() -> None:
    graph = captured(Dropping(), torch.randn(32, 16)).unplanned.schedule.graph
    assert "created by PyTorch" in why_unmeasurable(graph, [None] * len(graph.primals))
    assert why_unmeasurable(graph, [torch.ones(1)] * len(graph.primals)) == ""
    from encore.graph import OpClass

    first: Op = graph.ops[0]
    first.kind = OpClass.COLLECTIVE
    assert "may not run twice" in why_unmeasurable(graph, [torch.ones(1)] * len(graph.primals))


def test_tangents_without_a_loss_are_noise_from_a_seed() -> None:
    graph = captured(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), torch.randn(4, 8)).unplanned.schedule.graph
    (first,), (second,) = random_tangents(graph), random_tangents(graph)
    assert first.shape == (4, 8)
    assert torch.equal(first, second)
    assert first.std() > 0
