"""The blocks that a checkpoint is put around, and checkpoints that change no gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.workloads import tiny
from encore.compare.systems import checkpointed, repeated_blocks
from encore.compare.trainee import Trainee
from support.rounding import assert_close


class Scale(nn.Module):
    """A class of its own without children."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    """Two layers around the input, each with a norm of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Scale(), Scale()])
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norms[1](self.layers(self.norms[0](x)))


def found(model: nn.Module) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(block)] for block in repeated_blocks(model)]


def test_blocks_are_the_outermost_repeated_class() -> None:
    assert found(nn.Sequential(Scale(), *(Block() for _ in range(3)), nn.Linear(8, 1))) == ["1", "2", "3"]


def test_two_classes_of_blocks_are_found_together() -> None:
    encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2) for _ in range(2))
    decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2) for _ in range(2))
    assert found(nn.ModuleList([encoder, decoder])) == ["0.0", "0.1", "1.0", "1.1"]


def test_nested_sequentials_are_blocks_if_nothing_else_is_repeated() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    assert found(model) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        nn.LSTM(8, 8, num_layers=3),
        nn.Sequential(Block(), nn.Linear(8, 8)),
        nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Linear(8, 8)),
    ],
    ids=["layers in a row", "an LSTM", "one block", "nothing to train"],
)
def test_models_without_repeated_blocks(model: nn.Module) -> None:
    assert not [name for name in found(model) if "norms" not in name]


def test_a_function_has_no_blocks() -> None:
    assert repeated_blocks(torch.tanh) == []


@pytest.mark.parametrize(
    ("workload", "kind"), [("transformer", "Block"), ("resnet", "Bottleneck"), ("inception", "Inception")]
)
def test_blocks_of_workloads_are_those_that_a_user_would_choose(workload: str, kind: str) -> None:
    assert {type(block).__name__ for block in repeated_blocks(tiny(workload).model)} == {kind}


def test_checkpoints_change_no_gradient_and_lower_the_peak() -> None:
    plain = nn.Sequential(*(Block() for _ in range(4)))
    theirs, x = checkpointed(copy.deepcopy(plain)), torch.randn(64, 8)
    peaks = [Trainee(model, (x,)).measured().step_peak for model in (plain, theirs)]
    assert peaks[1] < peaks[0]
    for mine, its in zip(theirs.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert_close(mine.grad, its.grad)
