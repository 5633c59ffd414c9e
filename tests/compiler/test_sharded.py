"""FSDP2 on two processes: gradients equal plain FSDP2's, one budget a rank is kept, and gathered weights are freed."""

from __future__ import annotations

import gc
import itertools
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh

import encore
from encore.capture.torch_private import gathered_storages
from encore.errors import BudgetError, OptionError, RanksDisagreeError
from support.sharded_models import (
    BATCH,
    BLOCKS,
    LENGTH,
    Block,
    LanguageModel,
    arranged,
    batch,
    run_ranks,
    sharded,
    whole_gradients,
)

pytestmark = pytest.mark.slow

STEPS = 7
BUDGETS = ("80%", "60%", "min")
CASES = (*itertools.product(("blocks", "after"), BUDGETS), ("before", "60%"))
BUFFER = sum(one.nbytes for one in Block().parameters())
"""The largest buffer of a block. If a thread of gloo frees it unseen in the step that plans are made of, it counts."""
MEASURED = 3
"""Steps at the end that are measured. A buffer that a thread of gloo frees seems to stay: the lowest peak counts."""


def train(arrangement: str, rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """A few steps, with what they took."""
    torch._dynamo.reset()
    model = arranged(arrangement, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: dict[str, Any] = {"losses": [], "gradients": [], "peaks": [], "gathered": []}
    for number in range(STEPS):

        def step(number: int = number) -> None:
            loss = model(*batch(rank, number))
            if number < STEPS - MEASURED:
                blocks = [one.nbytes() for block in model.blocks for one in gathered_storages(block)]
                found["gathered"].append(blocks)
                assert any(one.nbytes() for one in gathered_storages(model)), "those of the root stay"
            loss.backward()
            found["losses"].append(loss.detach())

        if number < STEPS - MEASURED:
            step()
        else:
            gc.collect()
            found["peaks"].append(encore.measure(step).step_peak)
        found["gradients"].append(whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    if arrangement != "plain":
        report = encore.report(model)
        found["report"] = (report.resident, report.planned.step_peak, report.unplanned.step_peak)
        found["plan"] = report.plan
    return found


def work(rank: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {("plain", ""): train("plain", rank, {})}
    for arrangement, budget in CASES:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found[arrangement, budget] = train(arrangement, rank, {"budget": budget, "lowering": "eager"})
        texts = {str(one.message).splitlines()[0] for one in told if issubclass(one.category, UserWarning)}
        found[arrangement, budget]["told"] = sorted(texts)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each process found, by rank."""
    return run_ranks(work, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("rank", range(2))
def test_ranks_train_as_with_plain_fsdp2(trained: list[dict[Any, Any]], rank: int, case: tuple[str, str]) -> None:
    have, want = trained[rank][case], trained[rank]["plain", ""]
    assert all(torch.equal(one, other) for one, other in zip(have["losses"], want["losses"], strict=True))
    for step, (ours, theirs) in enumerate(zip(have["gradients"], want["gradients"], strict=True)):
        for name, gradient in ours.items():
            assert torch.equal(gradient, theirs[name]), (step, name)


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("rank", range(2))
def test_one_budget_bounds_the_whole_step_of_a_rank(
    trained: list[dict[Any, Any]], rank: int, case: tuple[str, str]
) -> None:
    found, plain = trained[rank][case], min(trained[rank]["plain", ""]["peaks"])
    resident, predicted, unplanned = found["report"]
    measured = min(found["peaks"])
    assert 0.99 * measured <= predicted <= 1.01 * measured + BUFFER, (measured, predicted)
    assert 0.99 * plain <= unplanned <= 1.01 * plain + BUFFER, (unplanned, plain)
    assert found["told"] == []
    _, budget = case
    if budget != "min":
        assert resident + measured <= float(budget[:-1]) / 100 * (resident + unplanned)
    else:
        assert measured < 0.5 * plain


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_run_the_same_plan(trained: list[dict[Any, Any]], case: tuple[str, str]) -> None:
    first, second = (found[case]["plan"] for found in trained)
    assert first == second
    assert any(graph.fates["recompute"] for graph in first.graphs)


@pytest.mark.parametrize("case", [("plain", ""), *CASES], ids="-".join)
def test_gathered_weights_are_freed_after_forward(trained: list[dict[Any, Any]], case: tuple[str, str]) -> None:
    for found in trained:
        steps = found[case]["gathered"]
        assert len(steps) == STEPS - MEASURED
        assert all(len(sizes) > BLOCKS and not any(sizes) for sizes in steps)


def test_gradients_are_those_of_one_process(trained: list[dict[Any, Any]]) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    torch.stack([model(*batch(rank, 0)) for rank in range(2)]).mean().backward()
    sharded_gradients = trained[0]["blocks", "60%"]["gradients"][0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(sharded_gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def tracked(_: int) -> int:
    """The peak of plain FSDP2 by PyTorch's own tracker, on fake tensors."""
    mesh = init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        model = sharded(LanguageModel(), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        words, targets = (torch.zeros(BATCH, LENGTH, dtype=torch.long) for _ in range(2))
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((words, targets))
        with tracker:
            for _ in range(2):
                model(words, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_unplanned_step_is_that_of_pytorchs_tracker(
    trained: list[dict[Any, Any]], tracker_peak: int, case: tuple[str, str]
) -> None:
    resident, _, unplanned = trained[0][case]["report"]
    assert 0.99 * tracker_peak <= resident + unplanned <= 1.01 * tracker_peak + BUFFER


@pytest.fixture(scope="module")
def tracker_peak(tmp_path_factory: pytest.TempPathFactory) -> int:
    (peak,) = run_ranks(tracked, tmp_path_factory.mktemp("tracker"), ranks=1, backend="fake")
    return int(peak)


def disagree(rank: int) -> Any:
    """One rank has been told another cost for everything: by itself it would plan something else."""
    if rank:
        vars(import_module("encore.cost.seconds"))["op_roofline"] = lambda graph, op, rates: 1.0 / (1 + op.id)
    return train("after", rank, {"budget": "60%", "lowering": "eager"})["plan"]


def test_ranks_that_disagree_about_costs_agree_about_the_plan(tmp_path: Path) -> None:
    first, second = run_ranks(disagree, tmp_path)
    assert first == second


def differ(rank: int) -> str:
    """The error of each rank if the two have different budgets."""
    model = arranged("after", {"budget": ("60%", "70%")[rank], "lowering": "eager"})
    try:
        model(*batch(rank, 0))
    except RanksDisagreeError as error:
        return str(error)
    except RuntimeError:  # the other rank is gone
        return ""
    return ""


def test_ranks_with_different_options_are_an_error(tmp_path: Path) -> None:
    """The first rank goes on alone, so one of them raises; neither waits for the other in the store."""
    told = run_ranks(differ, tmp_path)
    assert sum("different options" in text for text in told) == 1


def block_budgets(rank: int) -> str:
    """The error for blocks with budgets of their own."""
    model = LanguageModel()
    for number, block in enumerate(model.blocks):
        encore.compile(block, budget=f"{60 + number}%", lowering="eager")
    try:
        sharded(model)(*batch(rank, 0))
    except OptionError as error:
        return str(error)
    return ""


def test_blocks_with_different_budgets_are_an_error(tmp_path: Path) -> None:
    assert all("One budget bounds the whole step" in text for text in run_ranks(block_budgets, tmp_path))


def impossible(rank: int) -> list[int]:
    """The floors that are raised for a budget which no plan meets."""
    model = arranged("blocks", {"budget": "3300KiB", "lowering": "eager"})
    floors = []
    for step in range(4):
        try:
            model(*batch(rank, step)).backward()
        except BudgetError as error:
            floors.append(error.floor)
            break
    return floors


def test_every_rank_raises_for_a_budget_that_cannot_be_met(tmp_path: Path) -> None:
    for floors in run_ranks(impossible, tmp_path):
        assert len(floors) == 1
        assert floors[0] > 3300 * 2**10
