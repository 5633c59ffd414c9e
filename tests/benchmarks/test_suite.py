"""The benchmark's table, page and JSON, from made-up numbers; and the machine it names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import results, spine
from benchmarks.command import main
from benchmarks.spine import WORKLOADS, Comparison, SpineSuite, run_spine
from benchmarks.spine_table import page, render
from encore.machine import Machine, this_machine
from encore.terminal import progress
from support.json_schema import violations

MACHINE = Machine(
    encore="0.1.0", commit="0123456789", date="2026-01-31", torch="2.13.0", python="3.11.9",
    system="Linux x86_64", processor="A processor", cpu_capability="AVX2", cores=2, threads=2, memory=2**34,
    compiler=None, cuda=(),
)  # fmt: skip


def made_up(workload: str, *, graphs: int = 1, difference: float = 0.0) -> Comparison:
    return Comparison(
        workload=workload, operators=1234, graphs=graphs, plain=(), resident=2**20, eager_peak=3 * 2**20,
        encore_peak=2 * 2**20, predicted_peak=2 * 2**20 + 2**14, eager_seconds=0.5, encore_seconds=0.55, ratio=1.1,
        lowest_ratio=1.05, highest_ratio=1.25, rounds=9, first_step_seconds=4.0, capture_seconds=1.5,
        plan_seconds=0.25, simulator_seconds=0.004, gradient_difference=difference,
    )  # fmt: skip


SUITE_FOUND = SpineSuite(MACHINE, False, (made_up("nmt"), made_up("speech", graphs=2, difference=1e-7)))

TABLE = """\
workload                    nmt  speech (2 graphs)
operators                 1,234              1,234
eager peak             3.00 MiB           3.00 MiB
Encore peak            2.00 MiB           2.00 MiB
predicted              2.02 MiB           2.02 MiB
error                    +0.78%             +0.78%
eager step             500.0 ms           500.0 ms
Encore step            550.0 ms           550.0 ms
ratio (spread)  1.10 (1.05-1.25), within noise  1.10 (1.05-1.25), within noise
first step               4.00 s             4.00 s
capture                  1.50 s             1.50 s
plan                   250.0 ms           250.0 ms
simulator                4.0 ms             4.0 ms
gradients             identical            1.0e-07"""


def test_table() -> None:
    squeezed = [" ".join(line.split()) for line in render(SUITE_FOUND).splitlines()]
    assert squeezed == [" ".join(line.split()) for line in TABLE.splitlines()]


def test_page_names_machine_and_versions_and_nothing_private() -> None:
    text = page(SUITE_FOUND)
    assert "| nmt | 1,234 | 3.00 MiB | 2.00 MiB | 2.02 MiB | +0.78% |" in text
    assert "- processor: A processor\n" in text
    assert "- commit: 0123456789\n- date: 2026-01-31\n" in text
    assert "- torch: 2.13.0\n" in text
    assert "9 rounds a workload" in text
    assert str(Path.home()) not in page(SpineSuite(this_machine(), True, (made_up("nmt"),)))


def test_json() -> None:
    found = json.loads(SUITE_FOUND.to_json())
    assert violations(found, SpineSuite.schema()) == []
    assert [row["workload"] for row in found["comparisons"]] == ["nmt", "speech"]


def test_the_command_writes_both_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = dataclasses.replace(results.SUITES["spine"], run=lambda *, quick: SUITE_FOUND)
    monkeypatch.setitem(results.SUITES, "spine", made)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    assert main(["spine", "--json", "found.json", "--docs"]) == 0
    written = json.loads((tmp_path / "found.json").read_text())
    took = written["seconds"]
    assert took > 0
    timed = dataclasses.replace(SUITE_FOUND, seconds=took)
    assert written == json.loads(timed.to_json())
    assert (tmp_path / "docs" / "benchmarks-spine.md").read_text() == page(timed)
    assert capsys.readouterr().out == render(SUITE_FOUND) + "\n"


def test_the_index_of_the_pages_names_every_suite() -> None:
    docs = Path(__file__).parents[2] / "docs"
    index = (docs / "benchmarks.md").read_text()
    for name in results.SUITES:
        page = results.docs_page(name).name
        linked = f"[{page}]({page})" if (docs / page).exists() else "no page published"
        assert f"| `{name}` | {linked} |" in index


def test_the_suite_compares_every_workload(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(spine, "compare_workload", lambda build, **_: made_up(build().name))
    found = run_spine(quick=True)
    assert tuple(comparison.workload for comparison in found.comparisons) == WORKLOADS
    assert found.quick
    assert "tiny sizes" in render(found)


def test_progress_off_a_terminal_is_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("training", 40) as tell:
        for step in range(40):
            tell(f"loss {step}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training 1/40  loss 0"
    assert lines[-1] == "training 40/40  loss 39"
    assert len(lines) == 11
