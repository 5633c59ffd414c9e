"""The page as a file: whole, safe, small, and with every number that the report has."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import encore
from encore.compiler.profiles import STRETCHES
from encore.reports.page import MOST_MEMBERS, MOST_ROWS, at_peak, decision_data, html_page
from encore.reports.profile import LAYERS, Profile
from encore.reports.report import DecisionRow
from support.example_report import tower_estimate, tower_plan

LARGEST_PAGE = 1_500_000
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@pytest.fixture
def planned() -> encore.Report:
    return tower_plan()


@pytest.fixture
def estimate() -> encore.Estimate:
    return tower_estimate()


def data_of(html: str) -> dict[str, Any]:
    (found,) = DATA.findall(html)
    return dict(json.loads(found))


def test_the_page_is_written_whole(planned: encore.Report, tmp_path: Path) -> None:
    path = planned.to_html(tmp_path / "report.html")
    assert path.read_text() == html_page(planned)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_the_page_fetches_nothing(planned: encore.Report) -> None:
    html = html_page(planned)
    assert set(re.findall(r"https?://[^\s\"'<>]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(img|iframe|object|embed|video|audio|base)\b|@import|url\(|src=", html)
    assert re.findall(r'<link [^>]*href="([^"]*)"', html) == ["data:,"]
    assert "default-src 'none'" in html


def test_names_are_text_and_never_markup(planned: encore.Report) -> None:
    name = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    rows = tuple(dataclasses.replace(row, module=name, why=name, value=name, source=name) for row in planned.decisions)
    told = tuple(dataclasses.replace(item, module=name, operator=name) for item in planned.allocations)
    report = dataclasses.replace(planned, name=name, decisions=rows, allocations=told, plain=(name,))
    html = html_page(report, measured=[encore.Point(name, 1.0, 5)])
    plain = html_page(planned)
    assert html.count("<script") == plain.count("<script")
    assert "<img" not in html
    assert "<b>bold" not in plain
    assert data_of(html)["measured"][0]["name"] == name


def test_the_numbers_of_the_page(planned: encore.Report) -> None:
    data = data_of(html_page(planned, peers=[encore.Point("peer", 1.5, 1000)]))
    assert data["layers"] == list(LAYERS)
    assert data["budget"] == planned.budget
    assert data["taken"] == [planned.resident + planned.planned.step_peak, planned.planned.overhead]
    assert [tuple(point) for point in data["pareto"]] == list(planned.pareto)
    assert data["taken"] in data["pareto"]
    assert data["peers"] == [{"name": "peer", "seconds_ratio": 1.5, "step_peak": 1000}]
    after = data["profiles"]["planned"]
    assert sum(column[after["peak"]] for column in after["bytes"]) == data["taken"][0]
    rows = data["decisions"]["rows"]
    assert sum(row["count"] for row in rows) == len(planned.decisions)
    assert sum(row["count"] * row["bytes"] for row in rows) == sum(row.bytes for row in planned.decisions)
    assert any(row["count"] == len(row["members"]) == 4 for row in rows)


def test_what_is_alive_at_the_peak_folds(planned: encore.Report) -> None:
    found = at_peak(planned.allocations)
    assert [item.bytes for item in found] == sorted((item.bytes for item in found), reverse=True)
    assert any(item.count > 1 and "[0-3]" in item.module for item in found)
    (parameters,) = [item for item in found if item.kind == "parameter"]
    assert parameters.what == "parameters and buffers"


def long_profile() -> Profile:
    points = 2 * STRETCHES
    words = tuple(f"backward: native_layer_norm_backward, encoder.layers.{number}.norm" for number in range(points))
    columns = {layer: tuple(10**10 + number for number in range(points)) for layer in LAYERS}
    return Profile(40_000, tuple(range(points)), 500, words, columns, points - 1)


def test_ten_thousand_operators_make_a_small_page(planned: encore.Report) -> None:
    rows = tuple(
        DecisionRow(f"native_layer_norm_{n}", f"decoder.cells.{n % 97}.norm", f"model.py:{n % 211}", (64, 1024),
                    262144, "recompute", "cheaper to recompute than to keep", 1.2345678e-5, "native_layer_norm")
        for n in range(10_000)
    )  # fmt: skip
    long = dataclasses.replace(planned.planned, profile=long_profile())
    html = html_page(dataclasses.replace(planned, decisions=rows, planned=long, unplanned=long))
    assert len(html.encode()) < LARGEST_PAGE


def row(number: int, module: str) -> DecisionRow:
    return DecisionRow(f"v{number}", module, "m.py:1", (2,), 8 + number, "keep", "because", 0.0)


def test_what_a_page_leaves_out_is_counted() -> None:
    names = [f"{chr(97 + n % 26)}{chr(97 + n // 26 % 26)}{chr(97 + n // 676)}" for n in range(MOST_ROWS + 7)]
    found = decision_data([row(n, name) for n, name in enumerate(names)])
    assert (len(found["rows"]), found["left_out"]) == (MOST_ROWS, 7)
    same = [dataclasses.replace(row(1, f"cells.{n}"), value=f"v{n}") for n in range(MOST_MEMBERS + 5)]
    (folded,) = decision_data(same)["rows"]
    assert (folded["count"], len(folded["members"])) == (MOST_MEMBERS + 5, MOST_MEMBERS)


@pytest.mark.parametrize(
    ("wanted", "budget", "asked"),
    [
        ("min", None, "the lowest reachable peak"),
        ("1GiB", 1 << 30, "the fastest step within 1.00 GiB"),
        ("80%", ..., "the fastest step within 80 % of the largest unplanned step"),
    ],
)
def test_budgets_are_told(estimate: encore.Estimate, wanted: str, budget: Any, asked: str) -> None:
    report = estimate.plan(wanted)
    expected = int(0.8 * estimate.pareto[0][0]) if budget is ... else budget
    assert (report.budget, report.asked) == (expected, asked)
    assert asked in html_page(report)
    assert "more time" in estimate.report.asked


@pytest.mark.parametrize("ratio", [0, -1.0, float("nan"), float("inf"), "fast"])
def test_a_point_wants_a_ratio(ratio: Any) -> None:
    with pytest.raises(encore.OptionError, match="seconds_ratio"):
        encore.Point("eager", ratio, 100)


@pytest.mark.parametrize("peak", [-1, 1.5, True, "2GiB"])
def test_a_point_wants_bytes(peak: Any) -> None:
    with pytest.raises(encore.OptionError, match="step_peak"):
        encore.Point("eager", 1.0, peak)


def test_a_folder_that_is_missing_is_named(planned: encore.Report, tmp_path: Path) -> None:
    with pytest.raises(encore.OptionError, match=r"no folder .*nowhere.*create it first"):
        planned.to_html(tmp_path / "nowhere" / "report.html")
    with pytest.raises(encore.OptionError, match="is a folder; name a file"):
        planned.to_snapshot(tmp_path)
