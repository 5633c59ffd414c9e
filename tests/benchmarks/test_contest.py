"""The suites of the contest: what they tell, and peers that are what they claim to be."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import encore
from benchmarks import contest, results
from benchmarks.command import main
from benchmarks.contest import SUITES, ContestSuite, Entry, run_contest
from benchmarks.contest_table import COLUMNS, both_against_each, cells, page, render, summary
from benchmarks.differences import largest_difference
from benchmarks.save_on_cpu import SavedOnCpu
from benchmarks.workloads import WORKLOADS, build, tiny
from encore.compare import contest as package_contest
from encore.compare import systems
from encore.compare.outcome import Outcome
from encore.compare.plots import png, tradeoffs
from encore.compare.trainee import relative_distance
from encore.machine import this_machine
from support.json_schema import violations
from support.rounding import assert_close

MIB = 2**20


def outcome(system: str, peak: int, against_eager: float = 1.0, **more: Any) -> Outcome:
    return Outcome(
        system,
        seconds=0.5,
        quietest=0.4,
        against_eager=against_eager,
        lowest=against_eager - 0.02,
        highest=against_eager + 0.03,
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
        outcome("activation_memory_budget 0.1", 70 * MIB, 0.9, gradient_difference=0.7, own_draws=True),
        outcome("Encore, both, lossy", 30 * MIB, 0.8, gradient_difference=0.7),
        outcome("Encore", 40 * MIB, 0.97, predicted=40 * MIB, plan_seconds=0.25, predicted_seconds=0.38),
        outcome("Encore, as fast as eager", 25 * MIB, 0.99, predicted=25 * MIB, plan_seconds=0.25),
        outcome("Encore, budget='min'", 20 * MIB, 1.5, predicted=20 * MIB, plan_seconds=0.25),
        Outcome("torch.compile", failure="RuntimeError: no"),
        Outcome("save_on_cpu", left_out="it is late"),
    )
    gradients = {"transformer": 10 * MIB}
    return ContestSuite("echo", this_machine(), True, 2, {"transformer": found}, gradients, seconds=75.5)


def test_what_it_comes_to_is_told_in_sentences() -> None:
    assert summary(suite()) == [
        "Encore, as fast as eager: 4.00x less on average, 4.00x at most, at 0.99 of eager's time",
        "Encore: 2.50x less on average, 2.50x at most, at 0.97 of eager's time",
        "transformer: without the gradients, Encore's floor is 0.25 of the checkpoints', "
        "0.20 of activation_memory_budget's at its best",
    ]


def test_both_methods_are_held_against_the_better_one() -> None:
    found = [
        outcome("Encore, encoding alone", 60 * MIB),
        outcome("Encore, recomputing alone", 50 * MIB),
        outcome("Encore, both", 40 * MIB),
        outcome("Encore, both at the better's peak", 50 * MIB),
    ]
    assert both_against_each("vgg16", found) == (
        "vgg16: the better one alone, recomputing, holds 50.00 MiB; both in the same time 40.00 MiB (0.800); "
        "both in its memory take 1.000 of its time"
    )
    assert both_against_each("vgg16", found[:3]) == ""


def test_what_was_done_before_an_interruption_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    done = (outcome("eager", 100 * MIB),)

    def compare(name: str, *args: Any, **settings: Any) -> tuple[Outcome, ...]:
        if name == "nin":
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(contest, "_compare", compare)
    found = run_contest("gist", quick=True)
    assert found.outcomes == {"alexnet": done}
    assert found.interrupted


def test_a_part_of_a_suite_is_shown_and_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("docs", "plots"):
        (tmp_path / folder).mkdir()
    (tmp_path / "found.json").write_text("before")
    part = dataclasses.replace(suite(), interrupted=True)
    made = dataclasses.replace(results.SUITES["echo"], run=lambda *, suite, quick, minutes: part)
    monkeypatch.setitem(results.SUITES, "echo", made)
    assert main(["echo", "--json", "found.json", "--plots", "plots", "--docs"]) == 1
    told = capsys.readouterr()
    assert told.out == render(part) + "\n"
    assert told.err == "encore: interrupted; this is what was done before, and nothing of it was written\n"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["found.json"]
    assert (tmp_path / "found.json").read_text() == "before"


class Failing(nn.Module):
    """Works for so many steps, and then no longer."""

    def __init__(self, model: nn.Module, error: Exception, steps: int = 0) -> None:
        super().__init__()
        self.model, self.error, self.left = model, error, steps

    def forward(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.model(*args)


def failing(error: Exception, steps: int = 0) -> Callable[[nn.Module], nn.Module]:
    return lambda model: Failing(model, error, steps)


def contest_of(
    monkeypatch: pytest.MonkeyPatch, minutes: float | None = None, **peers: Callable[[nn.Module], nn.Module]
) -> dict[str, Outcome]:
    """These on a tiny network, and no Encore."""
    monkeypatch.setattr(contest, "_peers", lambda entry, *, quick: peers.items())
    no_plan = failing(encore.EncoreError("no plan\nat all"))
    monkeypatch.setattr(encore, "compile", lambda model, **options: no_plan(model))
    monkeypatch.setattr(package_contest, "SLOW", math.inf)  # a busy machine takes as many steps as an idle one
    monkeypatch.setitem(SUITES, "echo", {"lm": Entry(("LSTMCell",))})
    found = run_contest("echo", quick=True, minutes=minutes)
    assert page(found)
    png(tradeoffs(found.outcomes))
    return {one.system: one for one in found.outcomes["lm"]}


def test_whoever_fails_is_shown_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = contest_of(
        monkeypatch,
        eager=systems.eager,
        silent=failing(RuntimeError()),
        late=failing(ValueError("  too late  \nby far"), steps=4),
        peer=SavedOnCpu,
    )
    assert {name for name, one in found.items() if one.ran} == {"eager", "peer"}
    assert found["peer"].gradient_difference == 0
    assert found["silent"].failure == "RuntimeError"
    assert found["late"].failure == "ValueError: too late"
    for system in ("Encore", "Encore, everything kept", "Encore, budget='min'"):
        assert found[system].failure == "EncoreError: no plan"
    assert found["Encore, as fast as eager"].left_out.endswith("'Encore, everything kept', which failed")


@pytest.mark.parametrize("steps", [0, 2, 4, 6])
def test_a_workload_that_eager_cannot_train_is_shown_as_failing(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """In its first step, in the warm-up, in the trial, or in the rounds."""
    found = contest_of(monkeypatch, eager=failing(MemoryError("no room"), steps), peer=SavedOnCpu)
    assert {name: one.failure for name, one in found.items()} == {"eager": "MemoryError: no room"}


class Noisy(torch.nn.Module):
    """A peer that draws masks of its own, and says so, on a model with or without any."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        torch.rand(1)
        return self.model(*args)


@pytest.mark.parametrize(("dropout", "told"), [(0.5, True), (0.0, False)])
def test_own_draws_are_those_of_systems_with_a_generator_of_their_own_and_models_that_draw(
    monkeypatch: pytest.MonkeyPatch, dropout: float, told: bool
) -> None:
    monkeypatch.setattr(systems, "OWN_DRAWS", (Noisy,))
    monkeypatch.setattr(contest, "build", lambda name, **sizes: build("transformer", size="tiny", dropout=dropout))
    found = contest_of(monkeypatch, eager=systems.eager, other=SavedOnCpu, noisy=Noisy)
    assert {name: one.own_draws for name, one in found.items() if one.ran} == {
        "eager": False, "other": False, "noisy": told,
    }  # fmt: skip
    assert (cells("transformer", found["noisy"])[-1] == "own draws") is told


def test_in_few_minutes_only_what_is_always_there_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for minutes, ran in ((1e-9, {"eager"}), (1e9, {"eager", "save_on_cpu"})):
        found = contest_of(monkeypatch, minutes, eager=systems.eager, save_on_cpu=SavedOnCpu)
        assert {system for system, one in found.items() if one.ran} == ran
        assert found["save_on_cpu"].left_out == ("" if minutes > 1 else package_contest.NO_TIME)
        assert found["Encore, budget='min'"].left_out == ("" if minutes > 1 else package_contest.NO_TIME)
        assert found["Encore, everything kept"].failure


def test_gradients_that_are_no_numbers_are_not_the_same() -> None:
    ones, nans = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert largest_difference([ones, ones], [ones, ones]) == 0
    assert largest_difference([ones, ones, ones], [ones, nans, ones]) == math.inf
    assert largest_difference([nans], [nans]) == math.inf
    assert relative_distance([ones, nans], [ones, ones]) == math.inf
    assert cells("lm", outcome("peer", MIB, gradient_difference=math.inf))[-1] == "not numbers"


def test_a_row_says_what_was_predicted_and_a_failure_says_why() -> None:
    rows = {one.system: cells("transformer", one) for one in suite().outcomes["transformer"]}
    assert all(len(row) == len(COLUMNS) for row in rows.values())
    assert rows["Encore"][2:8] == (
        "40.00 MiB", "2.50x", "40.00 MiB", "500.0 ms", "0.97 (0.95-1.00), within noise", "0.95",
    )  # fmt: skip
    assert rows["checkpoint per block"][6] == "1.30 (1.28-1.33)"
    assert rows["activation_memory_budget 0.1"][-1] == "own draws"
    assert rows["Encore, both, lossy"][-1] == "7.0e-01, far off", "it draws what eager draws"
    assert rows["torch.compile"][2] == "failed: RuntimeError: no"
    assert rows["save_on_cpu"][2] == "left out: it is late"


def test_every_peer_takes_part_or_is_listed_with_the_reason() -> None:
    for suite_name, entries in SUITES.items():
        for name, entry in entries.items():
            peers = dict(contest._peers(entry, quick=False))
            assert list(peers) == [
                "eager", "checkpoint per block", "save_on_cpu", "torch.compile", "activation_memory_budget 0.5",
                "activation_memory_budget 0.1",
            ]  # fmt: skip
            left_out = {peer for peer, how in peers.items() if isinstance(how, str)}
            assert left_out <= {"checkpoint per block", "activation_memory_budget 0.5"}, (suite_name, name)
            assert suite_name != "echo" or not left_out
            quick = dict(contest._peers(entry, quick=True))
            assert isinstance(quick["activation_memory_budget 0.5"], str)
            assert callable(quick["torch.compile"])


def test_table_page_and_json_hold_every_row() -> None:
    found = suite()
    for text in (render(found), page(found)):
        assert all(one.system in text for one in found.outcomes["transformer"])
        assert all(line in text for line in summary(found))
    assert "- the suite took: 75.50 s" in page(found)
    told = json.loads(found.to_json())
    assert violations(told, results.SUITES["echo"].found.schema()) == []
    assert told["seconds"] == 75.5
    assert len(told["outcomes"]["transformer"]) == len(found.outcomes["transformer"])
    for row in told["outcomes"]["transformer"]:
        assert set(row) == set(Outcome.__slots__)


def test_a_picture_and_a_page_are_drawn(tmp_path: Path) -> None:
    found = suite()
    shown = results.Results("echo", "a < b", "{}", "", lambda: tradeoffs(found.outcomes))
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
    theirs = systems.checkpointed(other, ("Block",)) if peer == "checkpointed" else SavedOnCpu(other)
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
        assert mine.grad is not None
        assert its.grad is not None
        assert_close(mine.grad, its.grad)


@pytest.mark.slow
def test_methods_are_compared_in_the_same_time_and_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "gist", {"nin": SUITES["gist"]["nin"]})
    (outcomes,) = run_contest("gist", quick=True).outcomes.values()
    assert [one.system for one in outcomes if one.failure] == []
    assert both_against_each("nin", outcomes)
    found = {one.system: one for one in outcomes}
    better = min(found["Encore, encoding alone"].peak, found["Encore, recomputing alone"].peak)
    assert found["Encore, both at the better's peak"].peak <= better
    assert found["Encore, both"].gradient_difference < 3e-4  # half of the digits


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
