"""Seconds and workspaces of calls at sizes that were not measured, from those that were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from encore.cost import ScaledSeconds, Seconds, Workspaces, probe, rates, seconds, workspace
from encore.cost.fitted_workspaces import FittedWorkspaces
from encore.cost.rates import AssumedRates
from encore.cost.roofline import op_roofline
from encore.cost.scaled_seconds import TimedSizes, kernel_structure
from encore.graph import Graph, Op
from encore.measurements import MachineCache
from support.captured_graphs import captured, operators

aten = torch.ops.aten
pytestmark = pytest.mark.measured_times


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = MachineCache(tmp_path / "measurements.json", "here")
    for module in (seconds, rates, workspace):
        monkeypatch.setattr(module, "machine_cache", lambda: cache)


def product(rows: int) -> tuple[Graph, Op]:
    torch._dynamo.reset()
    graph = captured(lambda x, w: (x @ w).sum(), *_operands(rows)).unplanned.schedule.graph
    (op, *_) = operators(graph, aten.mm.default)
    return graph, op


def _operands(rows: int) -> Iterator[Tensor]:
    yield torch.randn(rows, 64, requires_grad=True)
    yield torch.randn(64, 256, requires_grad=True)


def test_seconds_between_timed_sizes_lie_between_theirs() -> None:
    sizes = TimedSizes()
    sizes.add(1.0, 2.0)
    sizes.add(4.0, 32.0)
    assert sizes.at(1.0) == 2.0
    assert sizes.at(2.0) == pytest.approx(8.0)
    assert sizes.at(8.0) == pytest.approx(64.0), "as the model grows"
    assert sizes.at(0.5) == pytest.approx(1.0)
    assert sizes.at(17.0) is None
    assert sizes.at(0.2) is None


def test_the_better_of_two_timings_counts() -> None:
    sizes = TimedSizes()
    sizes.add(1.0, 2.0)
    sizes.add(1.0, 1.5)
    sizes.add(1.0, 3.0)
    assert sizes.at(1.0) == 1.5


def test_an_operator_of_another_size_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Seconds(run=True)
    assert timed(*product(512)) > 0
    monkeypatch.setattr(seconds, "op_seconds", lambda *args, **options: pytest.fail("an operator is timed"))
    (graph, op), (other, same) = product(512), product(800)
    scaled = ScaledSeconds(timed)
    scaled.begin()
    assert scaled(graph, op) == timed(graph, op)
    model = op_roofline(other, same, AssumedRates()) / op_roofline(graph, op, AssumedRates())
    assert scaled(other, same) == pytest.approx(timed(graph, op) * model)


def test_sizes_that_are_far_or_come_often_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def op_seconds(graph: Graph, op: Op, over: int | None = None) -> float:
        asked.append(graph.values[op.reads[0]].shape[0])
        return 1e-3

    monkeypatch.setattr(seconds, "op_seconds", op_seconds)
    timed = Seconds(run=True)
    timed(*product(512))
    scaled = ScaledSeconds(timed)
    for _ in range(3):
        scaled.begin()
        scaled(*product(600))
    assert asked == [512, 600], "at the third graph"
    scaled.begin()
    scaled(*product(8000))
    assert asked == [512, 600, 8000]


def test_numbers_of_a_kernel_that_are_sizes() -> None:
    texts = [f"%0 = Operand(shape=({rows}, 1), dtype=torch.float32)\nadd(%0, %12, 0.5)" for rows in (16, 24)]
    assert kernel_structure(texts[0]) == kernel_structure(texts[1])
    assert kernel_structure(texts[0]) != kernel_structure(texts[0].replace("%12", "%13"))
    assert kernel_structure(texts[0]) != kernel_structure(texts[0].replace("0.5", "0.25"))


# -- workspaces -------------------------------------------------------------------------------------------------------


def fitted(*points: tuple[tuple[int, ...], int]) -> FittedWorkspaces:
    found = FittedWorkspaces()
    for sizes, taken in points:
        found.note("call", sizes, taken)
    return found


def test_a_law_that_holds_for_three_sizes_answers_between_them() -> None:
    found = fitted(((100, 8), 216), ((200, 8), 416), ((400, 8), 816))
    assert found.at("call", (300, 8)) == 616
    assert found.at("call", (401, 8)) is None, "not between sizes that were probed"
    assert found.at("call", (300, 9)) is None
    assert found.at("other", (300, 8)) is None


def test_no_answer_is_given_without_a_law() -> None:
    assert fitted(((100,), 216), ((400,), 816)).at("call", (300,)) is None, "two sizes"
    assert fitted(((100,), 0), ((200,), 0), ((400,), 64)).at("call", (300,)) is None, "another kernel from some size on"
    assert fitted(((100, 3), 5), ((200, 6), 10), ((400, 20), 20)).at("call", (300, 12)) == 15
    assert fitted(((100, 20), 5), ((200, 40), 10), ((400, 80), 20)).at("call", (300, 40)) is None, "two laws disagree"
    assert fitted(((100,), 32), ((200,), 32), ((400,), 32)).at("call", (300,)) == 32


def test_the_fourth_size_of_a_call_is_not_probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graphs = {rows: graph_of_loss(rows) for rows in (20, 40, 80, 60)}
    probed: list[Graph] = []

    def probing(graph: Graph, op: Op) -> probe.ProbedWorkspace:
        probed.append(graph)
        return probe.probe_workspace(graph, op)

    monkeypatch.setattr(workspace, "probe_workspace", probing)
    asked, other = nothing_known(tmp_path / "one.json"), nothing_known(tmp_path / "other.json")
    found = {rows: [asked(graph, op) for op in graph.ops] for rows, graph in graphs.items()}
    assert graphs[80] in probed
    assert graphs[60] not in probed
    assert found[60] == [other(graphs[60], op) for op in graphs[60].ops]
    assert graphs[60] in probed


def nothing_known(path: Path) -> Workspaces:
    found = Workspaces(run=True)
    found._cache = MachineCache(path, "here")
    return found


def graph_of_loss(rows: int) -> Graph:
    torch._dynamo.reset()
    x, y = torch.randn(rows, 8, requires_grad=True), torch.randint(8, (rows,))
    weights = torch.randn(8, 8, requires_grad=True)
    loss = captured(lambda x, w, y: torch.nn.functional.cross_entropy(x @ w, y), x, weights, y)
    return loss.unplanned.schedule.graph
