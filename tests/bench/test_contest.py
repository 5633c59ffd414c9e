"""The suites of the contest: what they tell, and peers that are what they claim to be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import encore
from encore.bench import plots, results, systems
from encore.bench.contest import SUITES, ContestSuite, Outcome, run_contest
from encore.bench.contest_table import COLUMNS, cells, page, render, summary
from encore.bench.machine import this_machine
from encore.workloads import WORKLOADS, tiny

MIB = 2**20


def outcome(system: str, peak: int, against_eager: float = 1.0, **more: Any) -> Outcome:
    return Outcome(
        system,
        seconds=0.5,
        quietest=0.4,
        against_eager=against_eager,
        peak=peak,
        reduction=100 * MIB / peak,
        first_step=1.5,
        **more,
    )


def suite() -> ContestSuite:
    found = (
        outcome("eager", 100 * MIB),
        outcome("checkpoint per block", 50 * MIB, 1.3),
        outcome("activation_memory_budget 0.5", 60 * MIB, 0.9),
        outcome("activation_memory_budget 0.1", 70 * MIB, 0.9, gradient_difference=0.7),
        outcome("Encore", 40 * MIB, 0.97, predicted=40 * MIB, plan_seconds=0.25, predicted_seconds=0.38),
        outcome("Encore, as fast as eager", 25 * MIB, 0.99, predicted=25 * MIB, plan_seconds=0.25),
        outcome("Encore, budget='min'", 20 * MIB, 1.5, predicted=20 * MIB, plan_seconds=0.25),
        Outcome("torch.compile", failure="RuntimeError: no"),
    )
    return ContestSuite("echo", this_machine(), True, 2, {"transformer": found}, {"transformer": 10 * MIB})


def test_what_it_comes_to_is_told_in_sentences() -> None:
    assert summary(suite()) == [
        "Encore, as fast as eager: 4.00x less on average, 4.00x at most, at 0.99 of eager's time",
        "Encore: 2.50x less on average, 2.50x at most, at 0.97 of eager's time",
        "transformer: without the gradients, Encore's floor is 0.25 of the checkpoints', "
        "0.20 of activation_memory_budget's at its best",
    ]


def test_a_row_says_what_was_predicted_and_a_failure_says_why() -> None:
    rows = {one.system: cells("transformer", one) for one in suite().outcomes["transformer"]}
    assert all(len(row) == len(COLUMNS) for row in rows.values())
    assert rows["Encore"][2:8] == ("40.00 MiB", "2.50x", "40.00 MiB", "500.0 ms", "0.97", "0.95")
    assert rows["activation_memory_budget 0.1"][-1] == "own draws"
    assert rows["torch.compile"][2] == "failed: RuntimeError: no"


def test_table_page_and_json_hold_every_row() -> None:
    found = suite()
    for text in (render(found), page(found)):
        assert all(one.system in text for one in found.outcomes["transformer"])
        assert all(line in text for line in summary(found))
    told = json.loads(found.to_json())
    assert told["encore_contest"] == 1
    assert set(told) == {"encore_contest", "suite", "machine", "quick", "rounds", "outcomes", "gradients"}
    assert len(told["outcomes"]["transformer"]) == len(found.outcomes["transformer"])
    for row in told["outcomes"]["transformer"]:
        assert set(row) == set(Outcome.__slots__)


def test_a_picture_and_a_page_are_drawn(tmp_path: Path) -> None:
    found = suite()
    shown = results.Results("echo", "a < b", "{}", "", lambda: plots.tradeoffs(found.outcomes))
    shown.write_plots(tmp_path)
    assert (tmp_path / "echo.png").read_bytes().startswith(b"\x89PNG")
    written = (tmp_path / "echo.html").read_text()
    assert "a &lt; b" in written
    assert written.count("<svg") == 1
    assert "Encore, as fast as eager" in written
    assert 'src="http' not in written
    assert 'href="http' not in written


def test_entries_are_workloads_with_such_blocks() -> None:
    for entries in SUITES.values():
        for name, entry in entries.items():
            assert name in WORKLOADS
            classes = {type(module).__name__ for module in tiny(name).model.modules()}
            assert set(entry.blocks) <= classes
    assert set(SUITES) <= set(results.SUITES)


@pytest.mark.parametrize("peer", ["checkpointed", "saved on cpu"])
def test_a_peer_computes_the_same(peer: str) -> None:
    workload = tiny("transformer")
    plain, other = workload.model, copy.deepcopy(workload.model)
    theirs = systems.checkpointed(other, ("Block",)) if peer == "checkpointed" else systems.SavedOnCpu(other)
    batch = workload.batch(0)
    peaks = []
    for model in (plain, theirs):

        def step(model: torch.nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            model(*batch).backward()

        step()
        model.zero_grad(set_to_none=True)
        peaks.append(encore.measure(step).step_peak)
    if peer == "checkpointed":
        assert peaks[1] < peaks[0]
    for mine, its in zip(theirs.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.slow
def test_a_quick_contest_runs_with_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "echo", {"transformer": SUITES["echo"]["transformer"]})
    found = run_contest("echo", quick=True)
    (outcomes,) = found.outcomes.values()
    assert [one.system for one in outcomes if one.failure] == []
    names = [one.system for one in outcomes]
    assert "activation_memory_budget 0.1" in names
    ours = {one.system: one for one in outcomes if one.is_encore}
    assert len(ours) == 5
    assert ours["Encore, budget='min'"].peak <= min(one.peak for one in ours.values())
    assert all(one.peak <= (one.predicted or 0) for one in ours.values())
