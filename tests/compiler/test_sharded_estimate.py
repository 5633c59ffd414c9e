"""Estimates of models that FSDP2 would shard, with no process group; and weights that are never saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import encore
from encore import OptionError
from encore.compiler.sharded_memory import GroupMemory
from support.sharded_models import BLOCKS, LENGTH, LanguageModel, batch

TRACKED = 10_209_800
"""What `FSDPMemTracker` gives for plain FSDP2 on two ranks; see `test_sharded.py`, which asks it."""


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel()


def test_two_shards_take_what_pytorchs_tracker_counts(model: LanguageModel) -> None:
    found = encore.estimate(model, *batch(0, 0), shards=2)
    targets = batch(0, 0)[1].nbytes  # which the tracker counts as the same tensor as the words
    assert found.unplanned == TRACKED + targets
    assert found.floor < 0.5 * found.unplanned
    planned = found.plan("60%")
    assert planned.resident + planned.planned.step_peak <= 0.6 * found.unplanned


def test_shards_and_their_optimizer_are_resident(model: LanguageModel) -> None:
    parameters = sum(one.nbytes for one in model.parameters())
    inputs = sum(one.nbytes for one in batch(0, 0))
    for shards in (1, 16):  # which divide all rows
        alone = encore.estimate(model, *batch(0, 0), shards=shards)
        assert alone.resident == parameters // shards + inputs
        trained = encore.estimate(model, *batch(0, 0), shards=shards, optimizer="AdamW")
        scalars = 4 * sum(1 for _ in model.parameters())
        assert trained.resident - alone.resident == 2 * parameters // shards + scalars


def test_rows_that_do_not_divide_are_padded(model: LanguageModel) -> None:
    shards = [one.shard for one in (GroupMemory.of(group) for _, _, group in encore.Sharding(3).groups(model))]
    padded = sum(-(-one.shape[0] // 3) * one[0].numel() * one.itemsize for one in model.parameters())
    assert sum(shards) == padded > sum(one.nbytes for one in model.parameters()) // 3


def test_more_shards_take_no_more_but_what_is_gathered(model: LanguageModel) -> None:
    peaks = [encore.estimate(model, *batch(0, 0), shards=shards).unplanned for shards in (2, 8)]
    assert peaks == sorted(peaks, reverse=True)


def test_parameters_that_stay_gathered_take_more(model: LanguageModel) -> None:
    freed = encore.estimate(model, *batch(0, 0), shards=2)
    stays = encore.estimate(model, *batch(0, 0), shards=encore.Sharding(2, reshard_after_forward=False))
    assert stays.unplanned > freed.unplanned
    blocks = sum(one.nbytes for one in model.blocks[1:].parameters())
    assert stays.unplanned - freed.unplanned <= blocks


def test_a_device_is_a_budget(model: LanguageModel) -> None:
    found = encore.estimate(model, *batch(0, 0), shards=2, device="H100", optimizer="AdamW")
    assert found.fits()
    assert "H100: fits as it is" in str(found)
    assert found.to_dict()["shards"] == 2


class Large(nn.Module):
    """Many identical blocks, far larger than this machine."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8192, 28672, bias=False), nn.GELU(), nn.Linear(28672, 8192, bias=False))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def test_identical_blocks_of_a_large_model_are_one_graph() -> None:
    with torch.device("meta"):
        large = Large(80).to(torch.bfloat16)
        x = torch.zeros(1, 4096, 8192, dtype=torch.bfloat16)
    found = encore.estimate(large, x, shards=64, optimizer="AdamW", device="A100-40GB")
    parameters = sum(one.nbytes for one in large.parameters())
    assert found.resident == 3 * parameters // 64 + 2 * 80 * 4 + x.nbytes
    step = found.estimate.step
    assert step is not None
    assert (len(step.calls), len(step.graphs)) == (80, 2), "the input of the first needs no gradient"
    assert found.profile is not None
    assert found.unplanned > found.profile.usable
    assert found.fits()


@pytest.mark.parametrize("shards", [0, -1, 1.5, True])
def test_shards_that_are_no_number_of_ranks_are_an_error(model: LanguageModel, shards: object) -> None:
    with pytest.raises(OptionError, match="number of ranks"):
        encore.estimate(model, *batch(0, 0), shards=shards)  # type: ignore[call-overload]


def test_a_model_without_blocks_is_an_error() -> None:
    with pytest.raises(OptionError, match="blocks="):
        encore.estimate(nn.Linear(4, 4), torch.ones(2, 4), shards=2)


def test_blocks_can_be_named(model: LanguageModel) -> None:
    named = encore.Sharding(2, blocks=(type(model.blocks[0]),))
    assert len(named.blocks_of(model)) == BLOCKS
    assert encore.estimate(model, *batch(0, 0), shards=named).unplanned == TRACKED + batch(0, 0)[1].nbytes
    assert batch(0, 0)[0].shape[1] == LENGTH
