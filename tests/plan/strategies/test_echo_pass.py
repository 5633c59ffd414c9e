"""Echo on the graphs that its authors test it with, on the loops it was made for, and on graphs drawn by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import encore
from benchmarks.workloads import build
from benchmarks.workloads.cell import LSTMCell
from encore.graph import Graph, OpClass, verify_graph
from encore.plan.strategies import Forward, echo, mirror
from encore.plan.strategies.echo_pass import echo_close, echo_partition, echo_prune, echo_recomputable
from support.captured_graphs import captured_graph, named, operators
from support.hand_made_graphs import Drawing
from support.recompute_reference import backward_asks_for, kept_bytes, names, workload_graph

aten = torch.ops.aten
H = 8
FLOAT = 4


def kept_names(graph: Graph, dropped: frozenset[int]) -> set[str]:
    return names(graph, backward_asks_for(graph, dropped)[0])


# -- the authors' four -----------------------------------------------------------------------------------------------


class TwoSums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, H), nn.Linear(3, H)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.left(x) + self.right(y)).sum()


def test_a_sum_of_two_layers_is_smaller_than_its_terms_and_kept() -> None:
    graph = captured_graph(TwoSums(), torch.randn(5, 3), torch.randn(5, 3))
    dropped = echo(graph)
    assert names(graph, dropped) == set()
    assert kept_names(graph, dropped) == {"tanh"}
    assert kept_bytes(graph, dropped) == 5 * H * FLOAT
    assert kept_bytes(graph, mirror(graph)) == 2 * 5 * H * FLOAT


class BroadcastSums(nn.Module):
    """What attention does at each step: a small query against all the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.query = nn.Linear(3, H), nn.Linear(3, 5 * H)
        self.score = nn.Linear(H, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        keys, queries = self.keys(x), [query.unsqueeze(0) for query in self.query(y).chunk(5)]
        return torch.cat([self.score(torch.tanh(keys + query)) for query in queries]).sum()


class FiveQueries(BroadcastSums):
    """The same with a product for each query, so that each is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(3, H)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        keys = self.keys(x)
        steps = [self.score(torch.tanh(keys + self.query(y[step : step + 1]))) for step in range(5)]
        return torch.cat(steps).sum()


@pytest.mark.parametrize(("model", "queries"), [(BroadcastSums(), torch.randn(3)), (FiveQueries(), torch.randn(5, 3))])
def test_sums_that_are_larger_than_their_terms_are_all_made_again(model: nn.Module, queries: torch.Tensor) -> None:
    graph = captured_graph(model, torch.randn(5, 3), queries)
    dropped = echo(graph)
    sums = [op for op in operators(graph, aten.add) if op.forward]
    tanhs = operators(graph, aten.tanh)
    assert (len(sums), len(tanhs)) == (5, 5)
    assert dropped == {op.writes[0] for op in (*sums, *tanhs)}
    assert kept_bytes(graph) == 5 * 5 * H * FLOAT
    assert kept_bytes(graph, dropped) == (5 * H + 5 * H) * FLOAT


class TanhOfTanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, H), nn.Linear(H, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(torch.tanh(self.enter(x)))).sum()


def test_of_two_tanhs_the_first_is_kept_and_the_second_made_again_for_the_gradient_of_the_layer() -> None:
    graph = captured_graph(TanhOfTanh(), torch.randn(5, 3))
    dropped = echo(graph)
    assert names(graph, dropped) == {"tanh_1"}
    assert kept_names(graph, dropped) == {"tanh"}
    assert kept_bytes(graph, dropped) == 5 * H * FLOAT
    assert kept_bytes(graph) == 2 * 5 * H * FLOAT
    readers = [graph.ops[reader] for reader in named(graph, "tanh_1").readers]
    assert {op.kind for op in readers if not op.forward} == {OpClass.HEAVY, OpClass.CHEAP}  # the layer's and its own
    assert all(graph.ops[graph.values[value].producer or 0].kind is not OpClass.HEAVY for value in dropped)


@pytest.mark.slow
def test_a_resnet_152_with_a_batch_of_32_keeps_little_more_than_half() -> None:
    """Results of convolutions; what batch norm, addition and ReLU make of them is made again. ResNet-50: see KEPT."""
    workload = build("resnet", depth=152, batch_size=32, resolution=224)
    (captured,) = encore.estimate(workload.model, *workload.batch(0)).captured
    graph = captured.unplanned.schedule.graph
    unplanned, planned = kept_bytes(graph), kept_bytes(graph, echo(graph))
    assert planned < 0.6 * unplanned
    assert (unplanned, planned) == (5_659_116_292, 2_886_927_616)


# -- loops -----------------------------------------------------------------------------------------------------------


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = LSTMCell(3, H)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        state = (xs.new_zeros(xs.shape[1], H), xs.new_zeros(xs.shape[1], H))
        for x in xs:
            state = self.cell(x, state)
        return state[0].sum()


def test_an_lstm_keeps_gates_and_cell_and_makes_the_rest_again() -> None:
    """A cell is carried to the next step: made again, it would lead back to the first. The last one is not."""
    steps, batch = 4, 5
    graph = captured_graph(Loop(), torch.randn(steps, batch, 3))
    dropped = echo(graph)
    gates = {f"sigmoid_{number}".removesuffix("_0") for number in range(3 * steps)}
    gates |= {f"tanh_{number}".removesuffix("_0") for number in range(0, 2 * steps, 2)}
    assert kept_names(graph, dropped) == gates | {"add_1", "add_3", "add_5"}
    assert kept_bytes(graph, dropped) == (4 * steps + steps - 1) * batch * H * FLOAT
    assert kept_bytes(graph) == (4 * steps + 2 + 3 * (steps - 1) + 1) * batch * H * FLOAT


def test_all_attention_steps_of_a_translator_make_their_scores_again() -> None:
    graph = workload_graph("nmt")
    dropped = echo(graph)
    kept, again = backward_asks_for(graph, dropped)

    def as_wide_as_the_source(values: set[int]) -> Counter[str]:
        wide = [value for value in values if graph.values[value].shape == (8, 6, 32)]
        return Counter(str(producer.target) for value in wide if (producer := graph.producer(value)))

    assert as_wide_as_the_source(again) == {"aten.add.Tensor": 6, "aten.tanh.default": 6, "aten.stack.default": 2}
    assert as_wide_as_the_source(kept) == {"aten.embedding.default": 2}
    assert (kept_bytes(graph), kept_bytes(graph, dropped)) == (265_652, 165_248)


# -- steps of the pass -----------------------------------------------------------------------------------------------


def test_heavy_operators_bound_subgraphs_and_shared_operands_join_them() -> None:
    drawing = Drawing()
    x = drawing.primal(10)
    shared = drawing.heavy(x, size=100)
    left, right = drawing.cheap(shared, size=100), drawing.cheap(shared, size=100)
    apart = drawing.cheap(drawing.heavy(left, size=100), size=100)
    drawing.cheap(right, size=100)  # no operator reads it
    drawing.needs(left, right)
    drawing.needs(apart)
    verify_graph(drawing.graph)
    forward = Forward.of(drawing.graph)
    ops = [forward.producer(value) for value in (left, right, apart)]
    apart_alone = echo_partition(forward, echo_recomputable(forward))
    assert sorted(map(sorted, apart_alone)) == [[ops[0]], [ops[1]], [ops[2]]]
    closed = echo_close(forward, apart_alone)
    assert sorted(map(sorted, closed)) == [[ops[0], ops[1]], [ops[2]]]
    assert [sorted(echo_prune(forward, subgraph)) for subgraph in closed] == [[ops[0], ops[1]], []]


def test_a_group_is_weighed_when_its_last_member_arrives() -> None:
    """Each of two readers alone releases nothing; together they release what both read, a step later."""
    drawing = Drawing()
    x = drawing.primal(10)
    shared, other = drawing.heavy(x, size=100), drawing.heavy(x, size=30)
    early = drawing.cheap(shared, size=60)
    late = drawing.cheap(shared, drawing.cheap(other, size=30), size=60)
    drawing.needs(early, late)
    assert echo(drawing.graph) == frozenset()


def test_what_comes_from_parameters_alone_is_made_again_for_nothing() -> None:
    drawing = Drawing()
    weight = drawing.primal(100)
    cast = drawing.cheap(weight, size=50)
    drawing.needs(drawing.view(cast))
    assert echo(drawing.graph) == {cast}
    assert kept_bytes(drawing.graph, {cast}) == 0


def test_behind_a_mask_made_from_inputs_results_are_weighed_as_ever() -> None:
    drawing = Drawing()
    mask = drawing.cheap(drawing.primal(10), size=10)
    scores = drawing.heavy(drawing.primal(1), size=100)
    weights = drawing.cheap(drawing.cheap(scores, mask, size=100), size=100)
    drawing.needs(weights, mask)
    assert echo(drawing.graph) == {mask}


def test_a_graph_of_many_thousand_operators() -> None:
    drawing = Drawing()
    weight = drawing.primal(10)
    keys = drawing.heavy(weight, size=1000)
    state = drawing.heavy(weight, size=10)
    for _ in range(1000):
        query = drawing.heavy(state, weight, size=10)
        scores = drawing.cheap(drawing.cheap(keys, drawing.view(query), size=1000), size=1000)
        state = drawing.cheap(drawing.heavy(scores, size=10), drawing.cheap(state, size=10), size=10)
        drawing.needs(scores, drawing.view(state))
    dropped = echo(drawing.graph)
    assert kept_bytes(drawing.graph, dropped) < kept_bytes(drawing.graph) / 10
