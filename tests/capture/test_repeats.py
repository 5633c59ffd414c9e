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
from torch.nn import functional as F

import encore
from against_eager import assert_matches_eager, assert_same, run_step, session_of
from captured import captured
from encore.capture import CapturedGraph, backend, repeats
from encore.capture.call_trace import NotRepeatableError
from encore.graph import Graph
from encore.workloads import build

STEPS = 4
WIDTH = 6


@pytest.fixture(autouse=True)
def _however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a test are short; take them for worth the while."""
    monkeypatch.setattr(repeats, "FEWEST_CALLS", 1)
    monkeypatch.setattr(repeats, "MOST_DISTINCT", 1.0)


class Net(nn.Module):
    """Layers for a body to choose from; the body is called with the net and an input, and writes the loop."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.words = nn.Embedding(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def example(requires_grad: bool = True) -> Tensor:
    return torch.randn(4, WIDTH, requires_grad=requires_grad)


# -- bodies ----------------------------------------------------------------------------------------------------------


def a_tensor_twice_in_a_call(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x * x) + torch.where(x > 0, x, x)
    return x.sum()


def a_tensor_twice_inside_a_call(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = F.normalize(net.first(x)) + F.cosine_similarity(x, net.second(x)).unsqueeze(1) + x
    return x.mean()


def an_operand_as_it_came(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        same = x.contiguous()
        x = net.first(same) + F.dropout(same, 0.0) * same + x
    return x.sum()


def detached_and_frozen(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = torch.tanh(x @ net.frozen + net.first(x) + net.second(x).detach())
    return x.sum()


def whole_numbers(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        best, where = net.first(x).max(-1, keepdim=True)
        x = torch.tanh(best * x + where) + net.words(x.argmax(-1))
    return x.sum()


def parts(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        first, _, last = net.first(x).chunk(3, -1)
        columns = net.second(x).unbind(1)
        narrow, _ = net.first(x).split([2, 4], dim=1)
        x = torch.cat([first * last, torch.stack([columns[0], columns[2]], 1), narrow], 1)
    return x.sum()


def the_same_tensor_three_times(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = x + net.attention(x, x, x, need_weights=False)[0]  # PyTorch asks: is the key the query?
    return x.sum()


def losses(net: Net, x: Tensor) -> Tensor:
    loss = x.new_zeros(())
    for _ in range(STEPS):
        x = net.norm(net.first(x).softmax(-1) + x)
        loss = loss + F.cross_entropy(x, torch.arange(4)) + F.mse_loss(x, torch.zeros(4, WIDTH))
    return loss


def views_and_broadcasts(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        square = net.first(x).view(2, 2, WIDTH)
        mixed = torch.bmm(square @ square.transpose(1, 2) / 2.0, square).reshape(4, WIDTH)
        x = mixed.mean(0, keepdim=True).expand(4, WIDTH) + mixed[:, 1:2] * x.flip(1)
    return x.sum()


def other_numbers(net: Net, x: Tensor) -> Tensor:
    for step in range(STEPS):
        x = torch.tanh(net.first(x).bfloat16()).float() * (step + 1) + x.double().float() * -0.0 + x * 0.0
    return x.sum()


def convolutions(net: Net, x: Tensor) -> Tensor:
    x = x.view(1, WIDTH, 4)
    for _ in range(STEPS):
        x = F.gelu(net.conv(x))
    return x.sum()


def cells(net: Net, x: Tensor) -> Tensor:
    hidden = cell = x.new_zeros(4, WIDTH)
    for _ in range(STEPS):
        hidden, cell = net.cell(x, (hidden, cell))
    return hidden.sum() + cell.sum()


def draws(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = F.dropout(torch.tanh(net.first(x)).t(), 0.3).t() + torch.rand_like(x) + torch.randn(4, WIDTH)
    return x.sum()


def work_for_nothing(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)
        net.second(x).sum()
    return x.sum()


def several_outputs(net: Net, x: Tensor) -> Any:
    outputs = []
    for _ in range(STEPS):
        x = torch.tanh(net.first(x))
        outputs.append(x * 2)
    return *outputs, x, x.argmax(-1), x.detach() + 1, {"sum": x.sum()}


def an_output_that_is_a_transposed_view(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)
    return x.t()


def an_output_that_is_a_part(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = torch.tanh(net.first(x))
    return x[2:, 1:4]


def a_linear_layer_in_three_dimensions(net: Net, x: Tensor) -> Tensor:
    x = x.view(2, 2, WIDTH)
    for _ in range(STEPS):
        x = net.first(x)
    return x


REPEATED = [
    a_tensor_twice_in_a_call, a_tensor_twice_inside_a_call, an_operand_as_it_came, detached_and_frozen, whole_numbers,
    parts, the_same_tensor_three_times, losses, views_and_broadcasts, other_numbers, convolutions, cells, draws,
    work_for_nothing, several_outputs, an_output_that_is_a_transposed_view, an_output_that_is_a_part, a_linear_layer_in_three_dimensions,
]  # fmt: skip


def written_in_place(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)
        x += 1
        x = F.relu(net.first(x), inplace=True)
    return x.sum()


def written_by_index(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)
        x[0] = 0
    return x.sum()


def statistics_of_batches(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.batch_norm(net.first(x))
    return x.sum()


def gradients_off_for_a_while(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        with torch.no_grad():
            constant = net.second(x)
        x = net.first(x) + constant
    return x.sum()


def outputs_that_share_memory(net: Net, x: Tensor) -> Any:
    for _ in range(STEPS):
        x = torch.tanh(net.first(x))
    return x, x.t()


def complex_numbers(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = torch.fft.irfft(torch.fft.rfft(net.first(x)).conj(), n=WIDTH)
    return x.sum()


def counted_from_the_beginning(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = torch.as_strided(net.first(x), (4, WIDTH), (WIDTH, 1))
    return x.sum()


def tensors_of_their_own(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)[:, [0, 2, 1, 3, 5, 4]]
    return x.sum()


NOT_REPEATABLE = [
    written_in_place, written_by_index, statistics_of_batches, gradients_off_for_a_while, outputs_that_share_memory,
    complex_numbers, counted_from_the_beginning, tensors_of_their_own,
]  # fmt: skip


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
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_graph_is_the_one_aot_autograd_traces(body: Callable[[Net, Tensor], Any], requires_grad: bool) -> None:
    pasted, whole = both_ways(Net(body), example(requires_grad))
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
    planned = assert_matches_eager(function, *halves, torch.randn(WIDTH, WIDTH, requires_grad=True))
    assert is_repeated(session_of(planned).graphs[0])


# -- the same step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", REPEATED)
def test_a_step_equals_eager_bit_for_bit(body: Callable[[Net, Tensor], Any]) -> None:
    planned = assert_matches_eager(Net(body), example())
    assert is_repeated(session_of(planned).graphs[0])


@pytest.mark.parametrize("body", NOT_REPEATABLE)
def test_what_does_more_than_compute_goes_through_aot_autograd(
    body: Callable[[Net, Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "encore"):
        planned = assert_matches_eager(Net(body), example())
    assert not is_repeated(session_of(planned).graphs[0])
    assert "traced one by one" in caplog.text


def test_autocast_goes_through_aot_autograd() -> None:
    model = encore.compile(Net(detached_and_frozen))
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

    model = encore.compile(Sparse())
    model(torch.arange(5)).backward()
    assert not any(is_repeated(graph) for graph in session_of(model).graphs)


def test_edges_that_aot_autograd_reads_otherwise_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, edges: Any) -> Any:
        raise NotRepeatableError("for the sake of the test")

    monkeypatch.setattr(repeats.Repeats, "joint", refuse)
    planned = assert_matches_eager(Net(parts), example())
    assert not is_repeated(session_of(planned).graphs[0])


def test_the_backend_under_no_grad() -> None:
    model = Net(parts)
    planned = torch.compile(model, backend="encore")
    x = example()
    with torch.no_grad():
        assert torch.equal(planned(x), model(x))


def test_no_grad_calls_and_calls_in_evaluation_mode() -> None:
    model, eager = encore.compile(net := Net(draws)), copy.deepcopy(net)
    model.load_state_dict(eager.state_dict())
    x = example()
    for training in (True, False, True):
        assert_same(run_step(model.train(training), (x,)), run_step(eager.train(training), (x,)))
        with torch.no_grad():
            torch.manual_seed(0)
            planned = model(x)
            torch.manual_seed(0)
            assert torch.equal(planned, eager(x))


def test_backward_twice_through_a_retained_graph() -> None:
    model, eager = Net(parts), Net(parts)
    eager.load_state_dict(model.state_dict())
    encore.compile(model)
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
    model = encore.compile(Net(detached_and_frozen))
    x = example()
    (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?i)double backward|twice differentiable"):
        gradient.sum().backward()


def test_a_saved_tensor_that_is_written_to_is_noticed() -> None:
    model = encore.compile(Net(work_for_nothing))
    x = torch.randn(4, WIDTH)
    loss = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_predicted_peak_is_the_measured_one() -> None:
    workload = build("nmt", steps=8, batch_size=16, hidden=32)
    model, batch = encore.compile(workload.model), workload.batch(0)
    model(*batch).backward()
    model.zero_grad(set_to_none=True)
    measured = encore.measure(lambda: model(*batch).backward())
    assert is_repeated(session_of(model).graphs[0])
    assert encore.report(model).planned.step_peak == measured.step_peak


def test_an_estimate_sees_the_same_graph() -> None:
    workload = build("lm", steps=6, batch_size=3, hidden=8)
    estimate = encore.estimate(workload.model, *workload.batch(0))
    model = encore.compile(workload.model)
    model(*workload.batch(0)).backward()
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
        encore.compile(model)(*args)
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

Layer = Callable[[Net, Tensor, Tensor], Tensor]
"""Takes the state of the loop and what came in at first, both `[4, WIDTH]`, and gives the next state."""

LAYERS: dict[str, Layer] = {
    "linear": lambda net, x, first: net.first(x),
    "tanh": lambda net, x, first: torch.tanh(x),
    "square": lambda net, x, first: x * x,
    "add": lambda net, x, first: x + first,
    "subtract": lambda net, x, first: first.sub(x, alpha=2),
    "gate": lambda net, x, first: torch.sigmoid(net.second(first)) * x,
    "norm": lambda net, x, first: net.norm(x),
    "softmax": lambda net, x, first: x.softmax(0),
    "transpose": lambda net, x, first: x.t().reshape(4, WIDTH),
    "turn": lambda net, x, first: x.t().contiguous().t(),
    "same": lambda net, x, first: x.contiguous(),
    "halves": lambda net, x, first: torch.cat(x.chunk(2, 1)[::-1], 1),
    "columns": lambda net, x, first: torch.stack([x.unbind(1)[column] for column in (0, 1, 1, 4, 2, 0)], 1),
    "mean": lambda net, x, first: x.mean(0, keepdim=True).expand(4, WIDTH),
    "clamp": lambda net, x, first: x.clamp(-0.5, 0.5),
    "masked": lambda net, x, first: x.masked_fill(first > 0, 0.0),
    "detached": lambda net, x, first: x.detach() + x,
    "normalize": lambda net, x, first: F.normalize(x),
    "dropout": lambda net, x, first: F.dropout(x, 0.3),
    "words": lambda net, x, first: net.words(x.argmax(-1)) + x,
    "rows": lambda net, x, first: x[1:2] * x + x[:, 2:3],
    "narrow": lambda net, x, first: F.pad(x[:, 1:], (0, 1)),
}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
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
    assert_matches_eager(model, x, steps=1)
