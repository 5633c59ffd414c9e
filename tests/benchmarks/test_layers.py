"""The suite `rnn` as it is read, from made-up numbers; and one small size measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import plots, results
from benchmarks.attention import AttentionRow
from benchmarks.layers import (
    PRODUCTS,
    THEIRS,
    Case,
    LayerSuite,
    Outcome,
    _fits,
    _layout,
    _tune,
    cases,
    compare_layers,
)
from benchmarks.layers_table import (
    ATTENTION_COLUMNS,
    COLUMNS,
    attention_cells,
    grid,
    grid_rows,
    page,
    render,
    rows,
    summary,
)
from encore.compare.plots import png
from encore.machine import this_machine
from encore.rnn import tuning
from encore.rnn.tuning import TORCHS
from support.json_schema import violations

pytestmark = pytest.mark.usefixtures("own_layers")

MIB = 2**20
LARGE = Case("large", "LSTM", 100, 64, 512, layers=2)
GRID = [Case("grid", "LSTM", steps, batch, hidden) for steps in (10, 35) for batch in (1, 8) for hidden in (64, 256)]
SUITE = LayerSuite(
    this_machine(),
    False,
    (
        Outcome(LARGE, THEIRS, 0.9, 0.88, 1.0, (1.0, 1.0), 5, 100 * MIB, 80 * MIB),
        Outcome(LARGE, "fast", 0.72, 0.7, 1.25, (1.2, 1.3), 5, 40 * MIB, 30 * MIB, "packed, 1024 rows"),
        Outcome(LARGE, "lean", 0.9, 0.88, 1.0, (0.9, 1.1), 5, 20 * MIB, 6 * MIB),
        Outcome(LARGE, PRODUCTS, 0.6, 0.6, 1.5, (1.4, 1.6), 5),
        *(
            Outcome(case, system, 0.01, 0.01, speed, (speed, speed), 9, MIB, MIB)
            for case in GRID
            for system, speed in ((THEIRS, 1.0), ("fast", 2.0 if case.batch == 1 else 0.5), ("lean", 1.0))
        ),
    ),
    (AttentionRow("additive", (32, 50, 50, 256), 80 * MIB, 3 * MIB, 160 * MIB, 6 * MIB, 0.4),),
)


def test_rows() -> None:
    found = {row[1]: row for row in rows(SUITE)}
    assert all(len(row) == len(COLUMNS) for row in found.values())
    assert found["fast"] == (
        "LSTM T100 B64 H512 x2", "fast", "720.0 ms", "1.25 (1.20-1.30)", "1.20", "40.00 MiB", "0.40", "30.00 MiB",
        "0.38", "5", "packed, 1024 rows",
    )  # fmt: skip
    assert found[PRODUCTS][3:6] == ("1.50 (1.40-1.60)", "1.00", "")


def test_attention_has_a_table_of_its_own() -> None:
    (row,) = attention_cells(SUITE)
    assert row[2:] == ("3.00 MiB", "80.00 MiB", "6.00 MiB", "160.00 MiB", "0.40")
    assert len(row) == len(ATTENTION_COLUMNS)
    assert all("32, 50, 50, 256" in text for text in (render(SUITE), page(SUITE)))


def test_what_it_comes_to_is_told_in_sentences() -> None:
    assert summary(SUITE) == [
        "LSTM T100 B64 H512 x2, fast: 1.25x the speed of torch.nn's, 0.40 of its peak, 0.38 of its saved bytes",
        "LSTM T100 B64 H512 x2, lean: 1.00x the speed of torch.nn's, 0.20 of its peak, 0.07 of its saved bytes",
        "LSTM over the grid, fast: 1.00x on average (geometric), at least 0.50x (T10 B8 H64)",
        "LSTM over the grid, lean: 1.00x on average (geometric), at least 1.00x (T10 B1 H64)",
    ]


def test_table_page_and_json_hold_every_row() -> None:
    for text in (render(SUITE), page(SUITE)):
        assert all(line in text for line in summary(SUITE))
        assert "T35" in text
        assert "0.50x" in text
    told = json.loads(SUITE.to_json())
    assert violations(told, results.SUITES["rnn"].found.schema()) == []
    assert len(told["outcomes"]) == len(SUITE.outcomes)
    for row in told["outcomes"]:
        assert set(row) == set(Outcome.__slots__)
        assert set(row["case"]) == set(Case.__slots__)


def test_sizes_left_to_torch_are_marked() -> None:
    left = [case for case in GRID if case.hidden == 64]
    outcomes = (
        dataclasses.replace(one, layout=str(TORCHS)) if one.system == "fast" and one.case in left else one
        for one in SUITE.outcomes
    )
    suite = dataclasses.replace(SUITE, outcomes=tuple(outcomes))
    assert ("fast", "T35", "B8", "0.50x*", "0.50x") in grid_rows(suite)[1]
    assert ("lean", "T35", "B8", "1.00x", "1.00x") in grid_rows(suite)[1]
    told = "4 of these are left to torch.nn's own layer; the others are at least 0.50x (T10 B8 H256)"
    assert summary(suite)[3] == told


def test_sizes_are_tuned_before_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    tuning.forget()
    case, large = Case("gru", "GRU", 6, 3, 16), Case("grid", "LSTM", 500, 128, 512)
    assert not large.tuned
    _tune([case, large, Case("cells", "LSTMCell", 1, 3, 16)])
    assert all(tuning.measured(case.size(stash)) for stash in case.stashes)
    assert not tuning.measured(large.size("fast"))
    known = tuning.measured(case.size("fast"))
    assert _layout(case, "fast") == str(tuning.best_of(known, tuning.rule(case.size("fast")), known))
    assert _layout(case, THEIRS) == ""
    tuning.forget()


def test_the_grid_is_drawn(tmp_path: Path) -> None:
    grids = {stash: grid(SUITE, stash) for stash in ("fast", "lean")}
    results.Results("rnn", "text", "{}", "", lambda: plots.speeds(grids)).write_plots(tmp_path)
    assert (tmp_path / "rnn.png").read_bytes().startswith(b"\x89PNG")
    assert "lean, 35 steps" in (tmp_path / "rnn.html").read_text()


def test_sizes_that_do_not_fit_are_left_out_and_told() -> None:
    assert _fits(Case("grid", "LSTM", 6, 3, 16))
    assert not _fits(Case("grid", "LSTM", 10**6, 10**3, 1024))
    missing = Case("grid", "LSTM", 35, 8, 256)
    left = tuple(one for one in SUITE.outcomes if one.case != missing)
    suite = dataclasses.replace(SUITE, outcomes=left, left_out=(missing,))
    assert summary(suite)[-1] == "too large for this machine's memory: LSTM T35 B8 H256"
    assert "-" in next(line for line in render(suite).splitlines() if "B8" in line and "T35" in line)
    assert png(plots.speeds({"fast": grid(suite, "fast")})).startswith(b"\x89PNG")


def test_cases_cover_what_the_page_promises() -> None:
    full = cases(quick=False)
    assert sum(case.group == "grid" for case in full) == 80
    assert {case.group for case in full} == {case.group for case in cases(quick=True)}
    assert str(Case("packed", "LSTM", 9, 2, 3, dtype="bfloat16", packed=True)) == "LSTM packed bfloat16 T9 B2 H3"


@pytest.mark.parametrize(
    "case",
    [
        Case("large", "LSTM", 6, 3, 16, layers=2),
        pytest.param(Case("gru", "GRU", 6, 3, 16), marks=pytest.mark.slow),
        pytest.param(Case("packed", "LSTM", 6, 3, 16, packed=True), marks=pytest.mark.slow),
        Case("cells", "LSTMCell", 1, 3, 16, stashes=("fast",)),
        pytest.param(Case("cells", "GRUCell", 1, 3, 16, stashes=("fast",)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_size_is_measured_in_every_system(case: Case) -> None:
    found = {one.system: one for one in compare_layers(case, seconds=0.0)}
    assert list(found)[: 1 + len(case.stashes)] == [THEIRS, *case.stashes]
    assert (PRODUCTS in found) == (case.group in ("large", "gru"))
    assert found[THEIRS].speed == 1
    for one in found.values():
        assert one.rounds >= 3
        assert one.speed > 0
        assert one.system == PRODUCTS or one.peak > 0
    if case.group == "large":
        assert found["lean"].saved < found["fast"].saved < found[THEIRS].saved
