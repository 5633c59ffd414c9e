"""A step with encore.nn's layers in it, compiled: predicted to the byte, with eager's gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import encore
from support.recurrent_pairs import KINDS
from support.rounding import assert_gradients_as_accurate

pytestmark = pytest.mark.usefixtures("own_layers")


class Tagger(nn.Module):
    def __init__(self, kind: str, stash: str) -> None:
        super().__init__()
        options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
        self.layers = getattr(encore.nn, kind)(12, 24, stash=stash, **options)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0]).square().mean()


@pytest.mark.parametrize("stash", ["fast", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_to_the_byte(kind: str, stash: str) -> None:
    eager = Tagger(kind, stash)
    model = copy.deepcopy(eager)
    x = torch.randn(6, 20, 12)
    encore.compile(model, lowering="eager", budget="1GiB")
    model(x).backward()
    eager(x).backward()
    assert_gradients_as_accurate(model, eager, lambda one, x: one(x).backward(), x)
    model.zero_grad(set_to_none=True)
    measured = encore.measure(lambda: model(x).backward())
    report = encore.report(model)
    assert report.planned.step_peak == measured.step_peak
    assert {row.source.partition(":")[0] for row in report.decisions if row.module == "layers"} == {Path(__file__).name}
