"""The suite `plan`: its figures as people read them, and the peer that is checkpointed by hand."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch

import encore
from encore.bench.machine import this_machine
from encore.bench.plan import BLOCKS, SIZES, PlanOutcome, PlanSuite, checkpointed
from encore.bench.plan_table import (
    COLUMNS,
    PLANNING_COLUMNS,
    cells,
    page,
    planning_cells,
    render,
    summary,
)
from encore.bench.planning import PlanningTime, planning_time
from encore.workloads import WORKLOADS, tiny

MIB = 2**20


def outcome(system: str, peak: int, against_eager: float = 1.0, **more: Any) -> PlanOutcome:
    return PlanOutcome(
        system, seconds=0.5, against_eager=against_eager, peak=peak, reduction=100 * MIB / peak, first_step=1.5, **more
    )


def suite() -> PlanSuite:
    found = (
        outcome("eager", 100 * MIB),
        outcome("checkpoint per block", 50 * MIB, 1.3),
        outcome("activation_memory_budget 0.5", 60 * MIB, 0.9),
        outcome("activation_memory_budget 0.1", 70 * MIB, 0.9, gradient_difference=0.7),
        outcome("Encore", 40 * MIB, 0.97, predicted=40 * MIB, plan_seconds=0.25, predicted_seconds=0.48),
        outcome("Encore, as fast as eager", 25 * MIB, 0.99, predicted=25 * MIB, plan_seconds=0.25),
        outcome("Encore, budget='min'", 20 * MIB, 1.5, predicted=20 * MIB, plan_seconds=0.25),
        PlanOutcome("torch.compile", failure="RuntimeError: no"),
    )
    planning = PlanningTime("nmt", 10_000, 7_500, 2.5, {"facts": 0.5, "verify": 0.1, "plan": 1.9}, 5.0)
    return PlanSuite(this_machine(), True, 2, {"transformer": found}, {"transformer": 10 * MIB}, (planning,))


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
    assert rows["Encore"][2:8] == ("40.00 MiB", "2.50x", "40.00 MiB", "500.0 ms", "0.97", "480.0 ms")
    assert rows["activation_memory_budget 0.1"][-1] == "own draws"
    assert rows["torch.compile"][2] == "failed: RuntimeError: no"


def test_the_time_to_plan_is_told_beside_that_of_pytorch() -> None:
    (planning,) = suite().planning
    assert planning_cells(planning) == ("nmt", "10,000", "7,500", "2.50 s", "5.00 s", "0.50")
    assert len(PLANNING_COLUMNS) == len(planning_cells(planning))
    assert "10,000" in render(suite())
    assert "| nmt | 10,000 | 7,500 | 2.50 s | 5.00 s | 0.50 |" in page(suite())


def test_planning_is_timed_on_the_graph_that_pytorch_splits() -> None:
    found = planning_time(lambda: tiny("transformer"))
    assert found.nodes > found.operators > 100
    assert found.encore == sum(found.stages.values()) > 0
    assert found.pytorch > 0


def test_table_page_and_json_hold_every_row() -> None:
    found = suite()
    for text in (render(found), page(found)):
        assert all(one.system in text for one in found.outcomes["transformer"])
        assert all(line in text for line in summary(found))
    told = json.loads(found.to_json())
    assert told["encore_bench_plan"] == 1
    assert len(told["outcomes"]["transformer"]) == len(found.outcomes["transformer"])


def test_blocks_and_sizes_are_those_of_workloads() -> None:
    assert set(BLOCKS) == set(SIZES) <= set(WORKLOADS)


def test_the_checkpointed_peer_computes_the_same_and_holds_less() -> None:
    workload = tiny("transformer")
    plain, by_hand = workload.model, checkpointed(copy.deepcopy(workload.model), BLOCKS["transformer"])
    batch = workload.batch(0)
    peaks = []
    for model in (plain, by_hand):

        def step(model: torch.nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            model(*batch).backward()

        step()
        model.zero_grad(set_to_none=True)
        peaks.append(encore.measure(step).step_peak)
    assert peaks[1] < peaks[0]
    for mine, its in zip(by_hand.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
