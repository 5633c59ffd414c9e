"""The suite `steps`: its workloads, its table from made-up numbers, and one tiny workload from end to end."""

from __future__ import annotations

import functools
import json
import random

import pytest
import torch

from benchmarks.steps import StepOutcome, StepSuite, compare_steps, trainee, true_gradients
from benchmarks.steps_table import page, render
from benchmarks.workloads.cut import CUT_WORKLOADS, TINY_CUT_SIZES, build_cut
from encore.compare.trainee import relative_distance
from encore.errors import OptionError
from encore.machine import this_machine
from support.json_schema import violations


@pytest.mark.parametrize("name", sorted(CUT_WORKLOADS))
def test_a_batch_gives_the_same_step_again(name: str) -> None:
    if name not in ("seq2seq", "blocks"):
        pytest.importorskip("transformers")
    workload = build_cut(name, **TINY_CUT_SIZES[name])
    for one, other in zip(workload.batch(3), workload.batch(3), strict=True):
        assert torch.equal(one, other)
    eager = trainee(workload)
    gradients = []
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        eager.timed()
        gradients.append(eager.gradients())
    assert len(gradients[0]) > 3
    assert relative_distance(*gradients) == 0
    if name in ("seq2seq", "blocks"):
        assert relative_distance(gradients[0], true_gradients(workload)) < 1e-5


def test_batches_of_sentences_have_lengths_of_their_own() -> None:
    workload = build_cut("seq2seq", **TINY_CUT_SIZES["seq2seq"])
    assert len({workload.batch(index)[1].shape for index in range(12)}) > 1


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(OptionError, match="no workload of several calls is called 'bert'"):
        build_cut("bert")
    with pytest.raises(OptionError, match="blocks has no size 'depth'"):
        build_cut("blocks", depth=3)


def test_one_workload() -> None:
    make = functools.partial(build_cut, "blocks", **TINY_CUT_SIZES["blocks"])
    found = compare_steps(make, rounds=1, budgets=("60%", "30%", "min"), lowering="eager")
    assert [one.system for one in found] == ["eager", "checkpoints", "Encore, 60%", "Encore, min", "Encore, 30%"]
    eager, checkpoints, shared, smallest, refused = found
    assert eager.measured is not None
    assert checkpoints.measured is not None
    assert shared.measured is not None
    assert smallest.measured is not None
    assert smallest.measured <= shared.measured < eager.measured
    assert shared.is_within
    assert (shared.graphs, shared.calls) == (2, 4)
    assert shared.predicted == pytest.approx(shared.measured, rel=0.01)
    assert shared.gradient_error == eager.gradient_error == checkpoints.gradient_error
    assert (refused.measured, refused.is_within) == (None, None)
    assert refused.floor is not None
    assert shared.budget is not None
    assert refused.floor <= smallest.measured * 1.05 < shared.budget


def made_up() -> StepSuite:
    eager = StepOutcome("eager", None, None, 2**20, 1e-7, 0.1, 1.0, (1.0, 1.0))
    over = StepOutcome("Encore, 60%", 2**19, 2**19, 2**19 + 1, 1e-7, 0.11, 1.1, (1.0, 1.2), 2, 13, 2**18)
    refused = StepOutcome("Encore, 40%", None, None, None, None, None, None, None, floor=2**18)
    return StepSuite(this_machine(), True, 3, {"blocks": (eager, over, refused)})


def test_table_page_and_json() -> None:
    suite = made_up()
    assert "| blocks | Encore, 60% | 2 x 13 | 512.00 KiB | 512.00 KiB | 512.00 KiB | **no** | 256.00 KiB |" in page(
        suite
    )
    assert "| blocks | Encore, 40% |  |  |  | cannot be met |  | 256.00 KiB |" in page(suite)
    assert "tiny sizes" in render(suite)
    assert violations(json.loads(suite.to_json()), StepSuite.schema()) == []
