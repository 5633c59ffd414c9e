"""One capture for many sizes: where Dynamo keeps dimensions symbolic, each size is planned and nothing is traced."""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import encore
from encore.compiler import shapes, sized_runner
from encore.compiler.session import sessions
from encore.errors import BudgetError
from support.compare_with_eager import assert_legal, assert_same, run_step, session_of


class Encoder(nn.Module):
    """Attention over positions, with a scale that depends on their number."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.queries, self.others = nn.Linear(16, 16), nn.Linear(16, 32)
        self.dropout = nn.Dropout(dropout)
        self.tags = nn.Linear(16, 5)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        x = self.embedding(words)
        keys, values = self.others(x).chunk(2, dim=-1)
        scores = self.queries(x) @ keys.transpose(1, 2) / math.sqrt(words.shape[1])
        x = x + self.dropout(torch.softmax(scores, dim=-1)) @ values
        return F.cross_entropy(self.tags(x).flatten(0, 1), tags.flatten())


class Reader(nn.Module):
    """A bidirectional LSTM after a convolution; returns every position and the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 6, 3, padding=1)
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs, _ = self.lstm(F.relu(self.convolution(x)).transpose(1, 2))
        return outputs, outputs.square().mean()


def sentences(length: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (rows, length)), torch.randint(5, (rows, length))


def features(length: int, rows: int = 3) -> tuple[Tensor]:
    return (torch.randn(rows, 4, length),)


def captures(model: Any) -> int:
    """How many graphs Dynamo has captured."""
    return len(session_of(model).graphs_keep_symbols)


@pytest.mark.parametrize("lowering", ["eager", "fused"])
@pytest.mark.parametrize(("kind", "batch"), [(Encoder, sentences), (Reader, features)])
def test_two_captures_serve_all_sizes(kind: type[nn.Module], batch: Any, lowering: str) -> None:
    torch.manual_seed(0)
    plain = kind(0.0) if kind is Encoder and lowering == "fused" else kind()
    planned = encore.compile(copy.deepcopy(plain), lowering=lowering)
    sizes = [(9, 3), (14, 3), (5, 3), (14, 2), (23, 4), (5, 3), (8, 7)]
    for length, rows in sizes:
        example = batch(length, rows)
        truth = None
        if lowering == "fused":
            truth = run_step(
                copy.deepcopy(plain).double(), tuple(x.double() if x.is_floating_point() else x for x in example)
            )
        assert_same(run_step(planned, example), run_step(plain, example), lowering, truth)
    unrolled = kind is Reader and lowering == "eager"  # PyTorch's own layer is a loop over positions
    assert captures(planned) == (6 if unrolled else 3)  # the first shape, lengths, and rows as well
    session = session_of(planned)
    assert len(session.graphs) == len(set(sizes)) == session.captured_so_far
    assert session.forwards_run == len(sizes)
    assert_legal(session)


def test_peaks_of_every_size_are_predicted_and_within_the_budget() -> None:
    torch.manual_seed(0)
    largest = encore.estimate(Encoder(), *sentences(60))
    unplanned = largest.resident + largest.unplanned.step_peak
    budget = (largest.floor + unplanned) // 2
    assert largest.floor < budget < unplanned
    planned = encore.compile(Encoder(), lowering="eager", budget=budget)
    for length in (60, 20, 45, 33, 59):
        batch = sentences(length)
        for _ in range(2):
            planned(*batch).backward()
            planned.zero_grad()

        def step(batch: tuple[Tensor, Tensor] = batch) -> None:
            planned(*batch).backward()
            planned.zero_grad()

        measured = encore.measure(step)
        graph = session_of(planned).last_step[-1]
        assert graph.plan.timeline.step_peak == measured.step_peak
        assert encore.report(planned).resident + measured.step_peak <= budget
    assert captures(planned) == 2


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=3, max_size=7), st.integers(0, 3))
@settings(max_examples=6, deadline=None)
def test_random_sizes_of_a_network_that_depends_on_them(sizes: list[tuple[int, int]], seed: int) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            rows, length = x.shape[:2]
            x = self.layers[0](x).tanh()
            if length > 6:
                x = self.layers[1](x.reshape(rows * length, 4)).sigmoid().view(rows, length, 4)
            if length % 2 == 0:
                x = self.layers[2](x[:, : length // 2]) * x[:, length // 2 :]
            return (x.cumsum(1) / length).square().sum() * rows

    torch.manual_seed(seed)
    plain = Branching()
    planned = encore.compile(copy.deepcopy(plain), lowering="eager", overhead=1.0)
    for length, rows in sizes:
        batch = (torch.randn(rows, length, 4, requires_grad=True),)
        assert_same(run_step(planned, batch), run_step(plain, batch), "eager")


def test_a_loop_over_positions_is_captured_for_each_length() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(x.shape[0], 4)
            for part in x.unbind(1):
                state = self.cell(part, state)
            return state.square().sum()

    torch.manual_seed(0)
    plain = Loop()
    planned = encore.compile(copy.deepcopy(plain), lowering="fused")
    for length in (3, 5, 4, 6):
        batch = (torch.randn(2, length, 4),)
        truth = run_step(copy.deepcopy(plain).double(), (batch[0].double(),))
        assert_same(run_step(planned, batch), run_step(plain, batch), "fused", truth)
    assert captures(planned) == 4


def test_tensors_of_the_user_keep_no_marks() -> None:
    planned = encore.compile(Reader())
    block = torch.randn(3, 4, 20)
    for length in (9, 12, 15):
        x = block[:, :, :length]  # a view
        outputs, loss = planned(x)
        loss.backward()
        for tensor in (x, block, outputs, loss):
            assert not [name for name in vars(tensor) if "dynamo" in name]
    assert captures(planned) == 2


def test_forwards_of_several_sizes_before_their_backwards() -> None:
    torch.manual_seed(0)
    plain = Encoder()
    planned = encore.compile(copy.deepcopy(plain), lowering="eager")
    batches = [sentences(length) for length in (4, 9, 6, 11)]
    for batch in batches:
        planned(*batch).backward()
    planned.zero_grad()
    for model in (planned, plain):
        torch.manual_seed(1)
        losses = [model(*batch) for batch in batches]
        for loss in (losses[2], losses[0], losses[3], losses[1]):
            loss.backward(retain_graph=True)
        losses[1].backward()
    for mine, its in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


def test_sizes_that_are_dropped_are_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_GRAPHS", 3)
    monkeypatch.setattr(shapes, "LEAST_SHAPES", 1)
    torch.manual_seed(0)
    plain = Encoder()
    planned = encore.compile(copy.deepcopy(plain), lowering="eager")
    session = session_of(planned)
    first = [weakref.ref(graph.plan.schedule.graph) for graph in _graphs_after(planned, [4, 5, 6])]
    _graphs_after(planned, [7, 8, 9])
    gc.collect()
    assert [one() for one in first] == [None] * 3
    for length in (4, 9, 5):
        batch = sentences(length)
        assert_same(run_step(planned, batch), run_step(plain, batch), "eager")
    assert len(session.graphs) == 3
    assert session.captured_so_far == 8


def _graphs_after(planned: Any, lengths: list[int]) -> list[Any]:
    for length in lengths:
        planned(*sentences(length)).backward()
    return session_of(planned).graphs


def test_a_graph_keeps_a_bounded_number_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized_runner, "MOST_SIZES", 3)
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Encoder(0.0)
    planned = copy.deepcopy(plain)
    planned.compile(backend="encore", options={"lowering": "eager"})
    for length in (4, 5, 6, 7, 8, 9, 5):
        batch = sentences(length)
        assert_same(run_step(planned, batch), run_step(plain, batch), "eager")
    kept = [session for session in sessions if session.one_graph and session.graphs]
    assert max(len(session.graphs) for session in kept) == 3


def test_a_size_above_the_budget_is_an_error_and_others_go_on() -> None:
    torch.manual_seed(0)
    plain = Encoder()
    floor = encore.estimate(plain, *sentences(40)).floor
    planned = encore.compile(copy.deepcopy(plain), lowering="eager", budget=floor)
    for length in (10, 12, 80, 11, 80, 9):
        batch = sentences(length)
        if length == 80:
            with pytest.raises(BudgetError):
                planned(*batch)
        else:
            assert_same(run_step(planned, batch), run_step(plain, batch), "eager")


def test_gradients_that_come_unexpectedly_for_one_size() -> None:
    torch.manual_seed(0)
    plain = Reader()
    planned = encore.compile(copy.deepcopy(plain), lowering="eager")
    for length in (6, 7, 8):
        planned(*features(length))[1].backward()
    batch = features(9)
    planned.zero_grad()
    with pytest.warns(UserWarning, match="forward runs|Forward runs"):
        planned(*batch)[0].sum().backward()
    plain(*batch)[0].sum().backward()
    for mine, its in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


def test_every_size_is_checked_against_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCORE_CHECK", "1")
    planned = encore.compile(Encoder(0.0), lowering="eager")
    for length in (5, 8, 7, 8):
        planned(*sentences(length)).backward()
    assert captures(planned) == 2


def test_sizes_are_returned_as_numbers() -> None:
    @encore.compile(lowering="eager")
    def planned(x: Tensor) -> tuple[Tensor, int, float]:
        return x.square().sum() / x.shape[0], x.shape[0] * 2, x.shape[0] / 4

    for length in (3, 6, 9, 7):
        x = torch.randn(length, requires_grad=True)
        loss, twice, quarter = planned(x)
        loss.backward()
        assert (twice, quarter) == (2 * length, length / 4)
        assert torch.equal(x.grad, torch.autograd.grad(x.square().sum() / length, x)[0])  # type: ignore[arg-type]


def test_an_operator_without_symbols_is_captured_for_each_shape() -> None:
    @torch.library.custom_op("encore_tests::doubled_rows", mutates_args=())
    def doubled_rows(x: Tensor) -> Tensor:
        return torch.cat([x, x])

    @doubled_rows.register_fake
    def _(x: Tensor) -> Tensor:
        if not isinstance(x.shape[0], int):
            raise TypeError("sizes are numbers here")
        return x.new_empty(2 * x.shape[0], *x.shape[1:])

    doubled_rows.register_autograd(lambda ctx, grad: grad[: len(grad) // 2] + grad[len(grad) // 2 :])
    function = functools.partial(lambda x: doubled_rows(x).sigmoid().sum())
    planned = encore.compile(lambda x: doubled_rows(x).sigmoid().sum(), lowering="eager")
    for length in (3, 5, 4, 6):
        x = torch.randn(length, 2, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        planned(x).backward()
        function(other).backward()
        assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]


def test_a_model_that_is_captured_for_most_lengths_gets_callables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_CAPTURED", 2)

    def step(x: Tensor) -> Tensor:
        rows = x.shape[0]
        return (x * sum(rows > 4 * bound for bound in range(8))).square().sum()

    planned = encore.compile(step, lowering="eager")
    for length in (3, 7, 11, 15, 19, 23):
        x = torch.randn(length, requires_grad=True)
        planned(x).backward()
        assert torch.equal(x.grad, torch.autograd.grad(step(x), x)[0])  # type: ignore[arg-type]
    assert session_of(planned).graphs_keep_symbols == [False, True, True, True, False, False]
