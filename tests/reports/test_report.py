"""A report as text and as data: golden output, folded rows, JSON that comes back as it went."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import encore
from benchmarks.workloads import tiny
from encore.reports import table
from encore.reports.profile import Profile
from encore.reports.report import DecisionRow, DeviceRow, GraphRow, Prediction
from encore.reports.steps import MeasuredStep, PlainLine
from encore.reports.table import LISTED_ROWS, common_path, fold
from encore.units import bytes_text, seconds_text
from support.captured_graphs import train_step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.leave = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.blocks(x)).sum()


def deep_report() -> encore.Report:
    model = encore.compile(Deep(), lowering="eager")
    train_step(model, torch.randn(16, 8))
    return encore.report(model)


def test_a_report_reads_like_this() -> None:
    line = inspect.getsourcelines(Block.forward)[1] + 1
    # 900 B of parameters and 512 B of inputs; the peak: two feature maps, the loss, and while the gradient of the last
    # block's weight is made, the gradients so far and two temporaries.
    text = re.sub(r"\d+\.\d\d s", "T s", str(deep_report()))
    assert text == (
        "Encore: Deep (eager lowering)\n"
        "  resident             1.38 KiB   parameters, buffers, inputs\n"
        "  step peak            2.32 KiB   predicted; unplanned 2.32 KiB\n"
        "  saved for backward   1.50 KiB\n"
        "  overhead                0.0%    predicted extra time\n"
        "  at the peak       gradient 328 B, feature map 1.00 KiB, output 4 B, temporary 1.00 KiB\n"
        "  first step        capture T s, plan T s, compile T s, first run T s\n"
        "   bytes  times  action  module        shape  line\n"
        f"1.50 KiB     x3  keep    blocks.[0-2]  16x8   test_report.py:{line}\n"
        "why: nothing to gain: the step fits as it is"
    )


def test_the_numbers_of_a_report() -> None:
    report = deep_report()
    parameters = 4 * (3 * (64 + 8) + 8 + 1)
    assert report.resident == parameters + 4 * 16 * 8
    assert report.planned == report.unplanned
    assert report.planned.saved == 3 * 512 + 4
    assert report.planned.step_peak == sum(report.planned.at_peak.values())
    assert [(row.bytes, row.shape, row.action, row.seconds) for row in report.decisions] == [
        (512, (16, 8), "keep", 0.0)
    ] * 3
    assert sorted(row.module for row in report.decisions) == ["blocks.0", "blocks.1", "blocks.2"]
    (graph,) = report.graphs
    assert (graph.step_peak, graph.saved) == (report.planned.step_peak, report.planned.saved)
    assert list(graph.seconds) == [
        "dynamo", "capture", "facts", "verify", "plan", "compile", "lower", "first forward", "first backward"
    ]  # fmt: skip
    assert sum(report.first_step.values()) == pytest.approx(sum(graph.seconds.values()))
    assert (graph.kernels, graph.kernel_calls, graph.rewrites) == (0, 0, ())


def test_a_fused_report_tells_of_kernels_and_passes() -> None:
    workload = tiny("transformer")
    model = encore.compile(workload.model, lowering="fused")
    train_step(model, *workload.batch(0))
    report = encore.report(model)
    (graph,) = report.graphs
    assert 0 < graph.kernels <= graph.kernel_calls
    assert 0 <= graph.kernels_compiled <= graph.kernels
    assert f"kernels           {graph.kernels}, called {graph.kernel_calls} times" in str(report)


def test_json_holds_the_whole_report() -> None:
    report = deep_report()
    data = json.loads(report.to_json())
    assert data.pop("encore_report") == 1
    assert not {"plan", "allocations"}.intersection(data)
    rows = tuple(DecisionRow(**{**row, "shape": tuple(row["shape"])}) for row in data.pop("decisions"))
    graphs = tuple(
        GraphRow(**{**row, "rewrites": tuple(row["rewrites"]), "notes": tuple(row["notes"])})
        for row in data.pop("graphs")
    )
    data |= {key: prediction(data[key]) for key in ("planned", "unplanned")} | {"plain": tuple(data["plain"])}
    data["pareto"] = tuple(map(tuple, data["pareto"]))
    data["devices"] = tuple(DeviceRow(**row) for row in data["devices"])
    assert encore.Report(**data, decisions=rows, graphs=graphs) == report


def prediction(data: dict[str, Any]) -> Prediction:
    profile = data.pop("profile")
    columns = {layer: tuple(column) for layer, column in profile.pop("bytes").items()}
    told: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in profile.items()}
    return Prediction(**data, profile=Profile(**told, bytes=columns))


def test_bytes_beside_the_step_are_resident() -> None:
    model = encore.compile(Deep(), resident=1000, lowering="eager")
    train_step(model, torch.randn(16, 8))
    report = encore.report(model)
    assert report.resident == deep_report().resident + 1000
    assert report.beside == 1000
    assert "parameters, buffers, inputs; 1000 B beside the step (optimizer)" in str(report)


def test_an_estimate_counts_bytes_beside_the_step() -> None:
    model, x = Deep(), torch.randn(16, 8)
    alone = encore.estimate(model, x)
    optimizer = torch.optim.Adam(model.parameters())
    beside = alone.beside(optimizer=optimizer, resident=10)
    parameters = list(model.parameters())
    extra = sum(2 * parameter.nbytes + 4 for parameter in parameters) + 10
    assert beside.resident == alone.resident + extra
    assert beside.floor == alone.floor + extra
    assert beside.beside(resident=10).resident == alone.resident + 10
    assert beside.plan(beside.floor).resident == beside.resident
    assert not beside.fits(alone.floor)


# -- folding -----------------------------------------------------------------------------------------------------------


def row(module: str, size: int = 8, why: str = "because", source: str = "m.py:1") -> DecisionRow:
    return DecisionRow("v", module, source, (2,), size, "keep", why, 0.0)


def test_rows_that_differ_in_numbers_fold() -> None:
    rows = [row(f"layers.{index}.fc") for index in range(6)]
    assert fold(rows) == [(rows[0], 6, "layers.[0-5].fc")]


@pytest.mark.parametrize(
    "other",
    [
        row("layers.1.gate"),
        row("layers.1.fc", size=9),
        row("layers.1.fc", why="else"),
        row("layers.1.fc", source="m.py:2"),
    ],
)
def test_rows_that_differ_otherwise_do_not_fold(other: DecisionRow) -> None:
    assert len(fold([row("layers.0.fc"), other])) == 2


def test_folded_rows_stand_by_their_total() -> None:
    small, large = [row(f"a.{index}", size=3) for index in range(5)], row("b", size=10)
    assert [(first.module, times) for first, times, _ in fold([large, *small])] == [("a.0", 5), ("b", 1)]


@pytest.mark.parametrize(
    ("paths", "common"),
    [
        (["encoder"], "encoder"),
        ([""], ""),
        (["layers.7.fc"], "layers.7.fc"),
        (["layers.0.fc", "layers.1.fc", "layers.2.fc"], "layers.[0-2].fc"),
        (["layers.2", "layers.0", "layers.1"], "layers.[0-2]"),
        (["layers.0", "layers.2"], "layers.[0,2]"),
        (["a.0.b.3", "a.1.b.3"], "a.[0-1].b.3"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], "a.[0-1].b.[0-1]"),
        (["fc1", "fc1"], "fc1"),
        (["layers.9", "layers.10"], "layers.[9-10]"),
    ],
)
def test_the_common_path(paths: list[str], common: str) -> None:
    assert common_path(paths) == common


def with_rows(rows: list[DecisionRow]) -> str:
    return str(dataclasses.replace(deep_report(), decisions=tuple(rows)))


def test_a_long_table_is_cut_and_says_so() -> None:
    text = with_rows([row(f"{chr(97 + index % 26)}{chr(97 + index // 26)}") for index in range(LISTED_ROWS + 3)])
    assert "\n... and 3 smaller rows; to_json() has them all" in text
    assert text.count("  keep  ") == LISTED_ROWS


def test_reasons_that_differ_have_a_column() -> None:
    text = with_rows([row("a", why="first reason"), row("b", why="second reason")])
    assert "why:" not in text
    assert ends_a_line(text, "first reason")
    assert ends_a_line(text, "second reason")


def test_a_column_is_one_row_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/extending.md says."""
    cost = table.Column(
        "cost",
        lambda row, times, module: seconds_text(row.seconds * times) if row.seconds else "",
        right=True,
        shown=lambda rows: any(row.seconds for row in rows),
    )
    monkeypatch.setattr(table, "COLUMNS", (*table.COLUMNS, cost))
    costly = dataclasses.replace(row("b"), seconds=0.002)
    assert "cost" not in with_rows([row("a")])
    assert "cost" in with_rows([row("a"), costly])
    assert ends_a_line(with_rows([row("a"), costly]), "2.0 ms")


def ends_a_line(text: str, reason: str) -> bool:
    return any(line.endswith(reason) for line in text.splitlines())


def test_parts_that_run_as_plain_pytorch_are_told() -> None:
    text = str(dataclasses.replace(deep_report(), plain=("graph 1: it returns nested lists",)))
    assert "\n  plain PyTorch: graph 1: it returns nested lists\n" in text


def test_several_graphs_are_listed_with_their_breaks() -> None:
    report = deep_report()
    broken = dataclasses.replace(report.graphs[0], break_reason="print", break_line="m.py:3")
    text = str(dataclasses.replace(report, graphs=(broken, report.graphs[0])))
    saves = f"saves {bytes_text(broken.saved)}"
    assert f"\n  graph 0: 43 operators, peak 2.32 KiB, {saves}; ends at m.py:3: print\n" in text


def test_a_step_above_its_budget_is_in_text_json_and_page(tmp_path: Path) -> None:
    lines = (PlainLine("train.py:12", "metrics", "<softmax>", 3 << 20), PlainLine("", "", "empty", 1 << 20))
    step = MeasuredStep(4, resident=1 << 20, step_peak=8 << 20, limit=6 << 20, plain=4 << 20, lines=lines)
    report = dataclasses.replace(deep_report(), measured=step)
    text = str(report)
    assert (
        "measured peak        8.00 MiB   step 4, outside code included; 3.00 MiB ABOVE the budget of 6.00 MiB" in text
    )
    assert "3.00 MiB  train.py:12 in metrics: <softmax>" in text
    assert "1.00 MiB  an unknown line: empty" in text
    found = json.loads(report.to_json())["measured"]
    assert (found["excess"], found["plain"], found["lines"][0]["line"]) == (3 << 20, 4 << 20, "train.py:12")
    page = report.to_html(tmp_path / "page.html").read_text()
    assert "3.00 MiB above the budget" in page
    assert "<td>train.py:12</td><td>metrics</td><td>&lt;softmax&gt;</td>" in page
    within = dataclasses.replace(report, measured=dataclasses.replace(step, limit=9 << 20, plain=None, lines=()))
    assert "ABOVE" not in str(within)
    assert 'id="outside"' not in within.to_html(tmp_path / "within.html").read_text()
