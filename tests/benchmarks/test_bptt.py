"""The suite of loops through time: what it tells, from made-up numbers, and one short run for real."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import bptt, plots, results
from benchmarks.bptt import BpttSuite, Outcome, run_bptt
from benchmarks.bptt_table import COLUMNS, OFFLOADED, cells, offloaded_cells, page, render, stall_verdicts, summary
from benchmarks.offload import DISK_ALONE, KEPT, OPTIONS, OffloadRow, offload_rows
from encore.compare.plots import png
from encore.machine import this_machine
from support.json_schema import violations

MIB = 2**20


def made_up() -> BpttSuite:
    outcomes = (
        Outcome("loop written out", 1000, 0.0004, 3, 56 * MIB, 60 * MIB, 1.0, None, 0.0),
        Outcome("encore.scan, Revolve", 1000, 0.0010, 3, 2 * MIB, 4 * MIB, 3.0, 3.0, 0.0),
        Outcome("encore.scan, disk", 1000, 0.0008, 3, 2 * MIB, 4 * MIB, 2.0, 1.99, 0.0, late=3),
        Outcome("encore.scan, Revolve", 100_000, 0.0016, 1, None, 6 * MIB, 4.5, 4.5, 0.0),
        Outcome("encore.scan, disk", 100_000, 0.00084, 1, 2 * MIB + 1, 6 * MIB, 2.0, 2.0, 1e-9),
    )
    offloaded = (
        OffloadRow("resnet", KEPT, 100 * MIB, 100 * MIB, 0.0, 0.5, 0, 0.0, 0.0, 0.0, 3),
        OffloadRow("resnet", DISK_ALONE, 60 * MIB, 60 * MIB, 0.9, 1.0, 40 * MIB, 0.4, 0.5, 0.0, 3),
    )
    return BpttSuite(
        this_machine(), False, MIB, 2**14, 2**19, outcomes, {1000: 2.93, 100_000: 4.1}, {1000: 2.93, 100_000: 4.1},
        {"loop written out": 0.0, "encore.scan, disk": 0.0}, offloaded,
    )  # fmt: skip


def test_what_it_comes_to() -> None:
    suite = made_up()
    assert summary(suite)[1:3] == [
        "to disk, over all lengths: peaks within 0.0% of each other, times a step within 5.0%",
        "Revolve's time over that to disk: 1.25x at 1,000, 1.90x at 100,000",
    ]
    assert summary(suite)[3:5] == [
        "a step of Revolve: 1000 us at 1,000, 1600 us at 100,000",
        "runs of a step as predicted, exactly, in 3 of 4 scans, and in 3 of the 3 without a state that left late",
    ]
    assert summary(suite)[5].endswith("2.9300 counted and 2.9300 by the formula at 1,000, "
                                      "4.1000 counted and 4.1000 by the formula at 100,000")  # fmt: skip
    assert summary(suite)[6:] == [
        "with dropout in the step, gradients of all ways are identical",
        "resnet, a disk alone: the predicted stall is 0.80 of the measured, within 20% of it",
    ]
    theirs = dataclasses.replace(suite, theirs={1000: 2.93, 100_000: 4.1})
    assert "2.9300 by the formula and 2.9300 by checkpoint_schedules at 1,000" in summary(theirs)[5]
    assert cells(suite.outcomes[2], suite) == (
        "encore.scan, disk", "1,000", "2.00 MiB", "4.00 MiB", "800 us", "2.00", "2.00", "1.99", "identical",
    )  # fmt: skip
    assert cells(suite.outcomes[3], suite)[2:6] == ("-", "6.00 MiB", "1600 us", "-")
    assert len(cells(suite.outcomes[0], suite)) == len(COLUMNS)
    assert "1.90x at 100,000" in render(suite)
    assert "| encore.scan, Revolve | 100,000 | - | 6.00 MiB | 1600 us |" in page(suite)
    assert violations(json.loads(suite.to_json()), results.SUITES["bptt"].found.schema()) == []
    assert png(plots.through_time(suite.outcomes)).startswith(b"\x89PNG")


def test_verdicts_on_stalls() -> None:
    suite = made_up()
    _, row = suite.offloaded
    off = dataclasses.replace(row, predicted_stall=0.39), dataclasses.replace(row, stall=0.0, predicted_stall=0.001)
    assert stall_verdicts(dataclasses.replace(suite, offloaded=off)) == [
        "resnet, a disk alone: the predicted stall is 0.78 of the measured, NOT within 20% of it",
        "resnet, a disk alone: 1.0 ms of stall predicted, none met",
    ]


def test_what_went_to_disk_is_told() -> None:
    suite = made_up()
    kept, alone = (offloaded_cells(row, suite) for row in suite.offloaded)
    assert kept[5:] == ("1.00", "-", "-", "-", "-", "identical")
    assert alone[2:] == (
        "60.00 MiB", "60.00 MiB", "1.00 s", "2.00", "900.0 ms", "40.00 MiB", "500.0 ms", "400.0 ms", "identical"
    )  # fmt: skip
    assert len(alone) == len(OFFLOADED)
    assert "## Activations on disk" in page(suite)
    assert "400.0 ms" in render(suite)


@pytest.mark.slow
def test_networks_go_to_disk_and_back() -> None:
    told: list[str] = []
    rows = offload_rows(quick=True, advance=told.append)
    assert [row.system for row in rows] == [*OPTIONS] * 2
    for row in rows:
        assert row.gradient_difference == 0
        assert row.peak <= row.predicted_peak
        assert (row.moved > 0) <= (row.predicted_seconds > row.predicted_stall >= 0)
    assert any(row.moved for row in rows if row.system == DISK_ALONE)
    assert len(told) == 2 * (len(OPTIONS) + 1)


def test_peaks_in_windows_are_those_of_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = bptt.Inputs(150)
    system = "encore.scan, Revolve"
    expected = bptt._peak(system, xs)
    for window in (7, 50, 10_000):
        monkeypatch.setattr(bptt, "WINDOW", window)
        found = bptt._long_peak(system, xs)
        assert found <= expected <= found + 64, "the sum of the last state is not seen"


@pytest.mark.slow
def test_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bptt, "QUICK_LENGTHS", (40, 80))
    monkeypatch.setattr(bptt, "WARM_UP", 10)
    monkeypatch.setattr(bptt, "LONG", 80)
    monkeypatch.setattr(bptt, "WINDOW", 30)
    monkeypatch.setattr(bptt, "offload_rows", lambda **_: [])
    suite = run_bptt(quick=True)
    assert [outcome.steps for outcome in suite.outcomes] == [40] * 4 + [80] * 4
    assert all(outcome.gradient_difference == 0 for outcome in suite.outcomes)
    assert suite.dropout_differences == dict.fromkeys(bptt.SYSTEMS, 0.0)
    assert suite.counted == suite.published
    assert suite.theirs in (None, suite.counted)
    punctual = [one for one in suite.outcomes if one.predicted_forwards is not None and not one.late]
    assert {one.system for one in punctual} >= {"encore.scan, Revolve"}, "to disk, a busy machine may delay states"
    assert all(one.forwards == one.predicted_forwards for one in punctual)
    for outcome in suite.outcomes:
        assert (outcome.peak is None) == (outcome.steps == 80 and outcome.system not in bptt.LONG_SYSTEMS)
        if outcome.peak is not None and outcome.system.startswith("encore"):
            assert outcome.peak <= suite.budget + 3 * suite.gradient_bytes
            assert outcome.forwards <= 4
