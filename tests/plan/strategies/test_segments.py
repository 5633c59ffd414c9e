"""Strategies that cut forward into pieces: Chen's equal segments, and the blocks that a network repeats."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from encore.graph import Graph
from encore.plan.strategies import Forward, block_boundaries, blocks, chen
from encore.plan.strategies.chen_segments import chen_cuts
from encore.plan.strategies.repeated_blocks import crossing_bytes, longest_runs
from support.captured_graphs import captured_graph
from support.hand_made_graphs import Drawing
from support.recompute_reference import backward_asks_for, kept_bytes, names, workload_graph

FLOAT = 4


def chain(length: int, size: int = 10) -> tuple[Graph, list[int]]:
    """Products one after the other, each needed by backward."""
    drawing = Drawing()
    weight = drawing.primal(1)
    values = [drawing.heavy(weight, size=size)]
    while len(values) < length:
        values.append(drawing.heavy(values[-1], size=size))
    drawing.needs(*values)
    return drawing.graph, values


def test_segments_are_equal_and_as_many_as_the_root_of_the_length() -> None:
    assert chen_cuts(9) == [3, 6]
    assert chen_cuts(100) == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert chen_cuts(10, segments=4) == [2, 5, 8]
    assert chen_cuts(3, segments=10) == [1, 2]
    assert chen_cuts(0) == chen_cuts(1) == chen_cuts(5, segments=1) == []


def test_a_chain_keeps_the_ends_of_its_segments_and_the_last_segment() -> None:
    graph, values = chain(9)
    dropped = chen(graph)
    assert dropped == {values[position] for position in (0, 1, 3, 4)}
    assert kept_bytes(graph, dropped) == 50
    assert kept_bytes(graph) == 90
    assert chen(graph, segments=1) == frozenset()
    assert chen(graph, segments=9) == frozenset()


def test_what_a_later_segment_reads_is_kept_and_its_views_are_not_asked() -> None:
    drawing = Drawing()
    weight = drawing.primal(1)
    early = drawing.heavy(weight, size=10)
    middle = drawing.heavy(early, size=10)
    late = drawing.heavy(middle, drawing.view(early), size=10)
    drawing.needs(early, middle, late)
    assert chen(drawing.graph, segments=3) == frozenset()
    assert chen(drawing.graph, segments=2) == frozenset()
    graph, values = chain(4)
    assert chen(graph, segments=2) == {values[0]}


def test_the_longest_repeat_wins_and_of_equal_ones_the_finest() -> None:
    layers = np.array([9, 8] + [1, 2, 1, 2, 3] * 4 + [7])
    (run,) = longest_runs(layers)
    assert (run.begin, run.length, run.period) == (2, 20, 5)
    steps = np.array([1, 2, 3] * 6)
    (run,) = longest_runs(steps)
    assert (run.begin, run.length, run.period) == (0, 18, 3)
    assert longest_runs(np.arange(10)) == []
    assert longest_runs(np.array([], dtype=int)) == []


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.widen(x)))


def test_a_boundary_lies_where_only_the_residual_stream_passes() -> None:
    layers, batch, width = 5, 3, 8
    model = nn.Sequential(nn.Linear(4, width), *(Residual(width) for _ in range(layers)))
    graph = captured_graph(model, torch.randn(batch, 4))
    forward = Forward.of(graph)
    boundaries = block_boundaries(graph)
    assert boundaries == [1, 5, 9, 13, 17]
    assert [int(crossing_bytes(forward)[place]) for place in boundaries] == [batch * width * FLOAT] * layers
    dropped = blocks(graph)
    kept, _ = backward_asks_for(graph, dropped)
    assert names(graph, kept) == {"addmm", "add", "add_1", "add_2", "add_3", "relu_4"}
    every_other, _ = backward_asks_for(graph, blocks(graph, every=2))
    assert names(graph, every_other) == {"add", "add_2", "relu_3", "relu_4", "add_3"}


def test_the_steps_of_a_loop_are_blocks() -> None:
    graph = workload_graph("nmt")
    encoder, decoder = [2 + 12 * cell for cell in range(13)], [184 + 35 * step for step in range(6)]
    assert block_boundaries(graph) == encoder + decoder
    assert (kept_bytes(graph), kept_bytes(graph, blocks(graph))) == (265_652, 91_444)


def test_a_graph_without_repeats_is_left_alone() -> None:
    drawing = Drawing()
    value = drawing.primal(1)
    for size in range(10, 20):
        value = drawing.cheap(value, size=size)
    drawing.needs(value)
    assert block_boundaries(drawing.graph) == []
    assert blocks(drawing.graph) == frozenset()
