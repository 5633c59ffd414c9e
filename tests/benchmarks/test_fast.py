"""The suite `fast` as it is read, from made-up numbers; a first step is taken in a real process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.fast import FastSuite, FirstStep, Outcome, _in_a_process
from benchmarks.fast_table import page, render
from benchmarks.workloads import TINY_SIZES
from encore.machine import this_machine
from support.json_schema import violations

STAGES = {"capture": 4.0, "plan": 1.0, "compile": 5.0, "first run": 0.5}
FOUND = FastSuite(
    machine=this_machine(),
    quick=False,
    rounds=9,
    outcomes={
        "nmt": (
            Outcome("torch.compile", 0.4, 0.8, (0.7, 1.1), 1.0, 3 * 2**20, None, 0.3, own_draws=True),
            Outcome("Encore", 0.3, 0.6, (0.5, 0.65), 0.75, 2**20, 2**20, 1.5e-7, own_draws=False),
        )
    },
    first_steps=(FirstStep("torch.compile", 30, "cold", 160.0), FirstStep("Encore", 30, "cold", 10.5, STAGES, 21)),
)


def test_rows() -> None:
    lines = [" ".join(line.split()) for line in render(FOUND).splitlines()]
    assert "nmt torch.compile 400.0 ms 0.80 (0.70-1.10), within noise 1.00 3.00 MiB own draws" in lines
    assert "nmt Encore 300.0 ms 0.60 (0.50-0.65) 0.75 1.00 MiB 1.00 MiB 1.5e-07" in lines
    assert "Encore 30 cold 10.50 s 4.00 s 1.00 s 5.00 s 500.0 ms 21" in lines


def test_page_and_json_hold_the_same() -> None:
    assert "| nmt | Encore | 300.0 ms | 0.60 (0.50-0.65) | 0.75 | 1.00 MiB | 1.00 MiB | 1.5e-07 |" in page(FOUND)
    data = json.loads(FOUND.to_json())
    assert violations(data, results.SUITES["fast"].found.schema()) == []
    assert data["outcomes"]["nmt"][1]["peak"] == 2**20
    assert data["first_steps"][1]["kernels"] == 21


@pytest.mark.slow
def test_a_first_step_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = _in_a_process("Encore, eager lowering", 6, "cold", tmp_path, dict(TINY_SIZES["nmt"]))
    assert found.kernels == 0
    assert 0 < sum(found.stages.values()) <= found.seconds * 1.01
