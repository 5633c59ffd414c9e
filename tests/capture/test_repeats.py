"""A graph that repeats itself is traced by its distinct calls: the joint graph is AOTAutograd's, operator for operator,
and a step is eager's, bit for bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import encore
from benchmarks.workloads import build
from encore.capture import repeats
from encore.capture.call_trace import NotRepeatableError
from encore.compiler import CapturedGraph, backend
from encore.graph import Graph
from support.captured_graphs import captured
from support.compare_with_eager import assert_matches_eager, assert_same, run_step, session_of
from support.loop_models import (
    LAYERS,
    NOT_REPEATABLE,
    REPEATED,
    STEPS,
    WIDTH,
    Net,
    detached_and_frozen,
    draws,
    example,
    parts,
    work_for_nothing,
)


@pytest.fixture(autouse=True)
def _however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a test are short; take them for worth the while."""
    monkeypatch.setattr(repeats, "FEWEST_CALLS", 1)
    monkeypatch.setattr(repeats, "MOST_DISTINCT", 1.0)


# -- the same graph ---------------------------------------------------------------------------------------------------


def is_repeated(graph: CapturedGraph) -> bool:
    return "capture of repeats" in graph.seconds


@contextmanager
def traced_as_a_whole() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "trace_repeats", lambda module: None)
        yield


def both_ways(model: nn.Module, *args: Any) -> tuple[CapturedGraph, CapturedGraph]:
    """The model's one graph, by way of its distinct calls and through AOTAutograd."""
    pasted = captured(copy.deepcopy(model), *args)
    torch._dynamo.reset()
    with traced_as_a_whole():
        whole = captured(copy.deepcopy(model), *args)
    assert is_repeated(pasted)
    assert not is_repeated(whole)
    return pasted, whole


def assert_same_graph(mine: Graph, its: Graph) -> None:
    """Equal in everything but the modules that gradients are told to belong to: AOTAutograd loses some."""
    for have, want in zip(mine.ops, its.ops, strict=True):
        assert str(have.target) == str(want.target)
        assert repr((have.args, have.kwargs)) == repr((want.args, want.kwargs))
        for fact in ("name", "writes", "returns_tuple", "kind", "source", "traced_in_forward", "forward"):
            assert getattr(have, fact) == getattr(want, fact), (have.name, fact)
        assert have.module == want.module or not want.module
    assert mine.values == its.values
    assert mine.storages == its.storages
    for fact in ("primals", "tangents", "outputs", "gradients", "copied_tangents", "leaves", "returned", "literals"):
        assert getattr(mine, fact) == getattr(its, fact), fact


@pytest.mark.parametrize("body", REPEATED)
def test_the_graph_is_the_one_aot_autograd_traces(body: Callable[[Net, Tensor], Any]) -> None:
    pasted, whole = both_ways(Net(body), example(requires_grad=False))
    assert_same_graph(pasted.plan.schedule.graph, whole.plan.schedule.graph)
    assert pasted.plan.schedule.saved == whole.plan.schedule.saved
    assert pasted.plan.timeline == whole.plan.timeline


@pytest.mark.parametrize("name", ["nmt", "lm"])
def test_the_graph_of_a_recurrent_workload_is_the_one_aot_autograd_traces(name: str) -> None:
    workload = build(name, steps=6, batch_size=3, hidden=8)
    pasted, whole = both_ways(workload.model, *workload.batch(0))
    assert_same_graph(pasted.plan.schedule.graph, whole.plan.schedule.graph)
    assert pasted.plan.timeline == whole.plan.timeline


def test_inputs_that_are_views_of_one_tensor() -> None:
    def function(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        for _ in range(STEPS):
            left, right = torch.tanh(left @ weight) + right, left.t().reshape(4, WIDTH) * right
        return left.sum() + right.sum()

    halves = torch.randn(2, 4, WIDTH).unbind(0)
    planned = assert_matches_eager(function, *halves, torch.randn(WIDTH, WIDTH, requires_grad=True), lowering="eager")
    assert is_repeated(session_of(planned).graphs[0])


# -- the same step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", REPEATED)
def test_a_step_equals_eager_bit_for_bit(body: Callable[[Net, Tensor], Any]) -> None:
    planned = assert_matches_eager(Net(body), example(), lowering="eager")
    assert is_repeated(session_of(planned).graphs[0])


@pytest.mark.parametrize("body", NOT_REPEATABLE)
def test_what_does_more_than_compute_goes_through_aot_autograd(
    body: Callable[[Net, Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "encore"):
        planned = assert_matches_eager(Net(body), example(), lowering="eager")
    assert not is_repeated(session_of(planned).graphs[0])
    assert "traced one by one" in caplog.text


def test_autocast_goes_through_aot_autograd() -> None:
    model = encore.compile(Net(detached_and_frozen), lowering="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(example()).backward()
    assert not is_repeated(session_of(model).graphs[0])


def test_a_sparse_gradient_goes_through_aot_autograd() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, WIDTH, sparse=True)

        def forward(self, words: Tensor) -> Tensor:
            return sum((self.words(words) * step).sum() for step in range(STEPS))  # type: ignore[return-value]

    model = encore.compile(Sparse(), lowering="eager")
    model(torch.arange(5)).backward()
    assert not any(is_repeated(graph) for graph in session_of(model).graphs)


def test_edges_that_aot_autograd_reads_otherwise_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, edges: Any) -> Any:
        raise NotRepeatableError("for the sake of the test")

    monkeypatch.setattr(repeats.Repeats, "joint", refuse)
    planned = assert_matches_eager(Net(parts), example(), lowering="eager")
    assert not is_repeated(session_of(planned).graphs[0])


def test_the_backend_under_no_grad() -> None:
    model = Net(parts)
    planned = torch.compile(model, backend="encore")
    x = example()
    with torch.no_grad():
        assert torch.equal(planned(x), model(x))


def test_no_grad_calls_and_calls_in_evaluation_mode() -> None:
    model, eager = encore.compile(net := Net(draws), lowering="eager"), copy.deepcopy(net)
    model.load_state_dict(eager.state_dict())
    x = example()
    for training in (True, False, True):
        assert_same(run_step(model.train(training), (x,)), run_step(eager.train(training), (x,)), "eager")
        with torch.no_grad():
            torch.manual_seed(0)
            planned = model(x)
            torch.manual_seed(0)
            assert torch.equal(planned, eager(x))


def test_backward_twice_through_a_retained_graph() -> None:
    model, eager = Net(parts), Net(parts)
    eager.load_state_dict(model.state_dict())
    encore.compile(model, lowering="eager")
    x = example()
    for net in (model, eager):
        loss = net(x)
        loss.backward(retain_graph=True)
        loss.backward()
    for name, parameter in eager.named_parameters():
        gradient = model.get_parameter(name).grad
        assert (gradient is None) == (parameter.grad is None)
        if gradient is not None and parameter.grad is not None:
            assert torch.equal(gradient, parameter.grad)
    assert is_repeated(session_of(model).graphs[0])


def test_a_second_derivative_is_refused() -> None:
    model = encore.compile(Net(detached_and_frozen), lowering="eager")
    x = example()
    (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?i)double backward|twice differentiable"):
        gradient.sum().backward()


def test_a_saved_tensor_that_is_written_to_is_noticed() -> None:
    model = encore.compile(Net(work_for_nothing), lowering="eager")
    x = torch.randn(4, WIDTH)
    loss = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_predicted_peak_is_the_measured_one() -> None:
    workload = build("nmt", steps=8, batch_size=16, hidden=32)
    model, batch = encore.compile(workload.model, lowering="eager"), workload.batch(0)
    model(*batch).backward()
    model.zero_grad(set_to_none=True)
    measured = encore.measure(lambda: model(*batch).backward())
    assert is_repeated(session_of(model).graphs[0])
    assert encore.report(model).planned.step_peak == measured.step_peak


def test_an_estimate_sees_the_same_graph() -> None:
    workload = build("lm", steps=6, batch_size=3, hidden=8)
    model = encore.compile(copy.deepcopy(workload.model), lowering="eager")
    model(*workload.batch(0)).backward()
    estimate = encore.estimate(workload.model, *workload.batch(0))  # by now all workspaces have been measured
    assert estimate.unplanned == encore.report(model).unplanned


# -- how much is traced -----------------------------------------------------------------------------------------------


def templates_of(model: Callable[..., Any], *args: Any) -> int:
    """How many distinct calls a step is traced by."""
    found: list[repeats.Repeats | None] = []

    def trace(module: Any) -> repeats.Repeats | None:
        found.append(repeats.trace_repeats(module))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "trace_repeats", trace)
        encore.compile(model, lowering="eager")(*args)
    (repeated,) = found
    assert repeated is not None
    return repeated.templates


def test_more_steps_are_not_more_to_trace() -> None:
    def steps(count: int) -> Callable[[Net, Tensor], Tensor]:
        def body(net: Net, x: Tensor) -> Tensor:
            for _ in range(count):
                x = net.norm(torch.tanh(net.first(x)) + x)
            return x.sum()

        return body

    assert templates_of(Net(steps(10)), example()) == templates_of(Net(steps(60)), example())


def test_a_short_graph_is_traced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "FEWEST_CALLS", 1000)
    assert not is_repeated(captured(Net(parts), example()))


def test_a_graph_of_distinct_calls_is_traced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_DISTINCT", 0.1)
    assert not is_repeated(captured(Net(parts), example()))


# -- any loop ---------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6), steps=st.integers(1, 4))
def test_any_loop_of_layers_gives_the_same_graph_and_the_same_bits(names: list[str], steps: int) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        first = net.second(x)
        x = x + net.frozen[:4]
        for _ in range(steps):
            for name in names:
                x = LAYERS[name](net, x, first)
        return x.sum() + first.mean()

    torch._dynamo.reset()
    model, x = Net(body), example()
    pasted, whole = both_ways(model, x)
    assert_same_graph(pasted.plan.schedule.graph, whole.plan.schedule.graph)
    assert_matches_eager(model, x, steps=1, lowering="eager")
