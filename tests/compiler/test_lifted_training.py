"""Fifty steps of training with torch.nn's recurrent layers unchanged: through Encore's operators and in plain eager.

Sums come out in another order, so that losses may differ in their last digits, and by more with every step: training
magnifies roundings. By how much, a third run tells, in plain eager from weights that are one rounding away.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import encore
from benchmarks.workloads import Workload, build

STEPS = 50
APART = 2e-5
"""How far the curves may be apart, as a share of the first loss,"""
DRIFTS = 3
"""or in terms of how far one rounding takes eager's."""


def losses(workload: Workload, model: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.Adam(model.parameters(), lr=workload.learning_rate)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*workload.batch(step))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


def nudged(model: nn.Module) -> nn.Module:
    """The model with every weight moved to the next number there is."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.nextafter(torch.full_like(parameter, torch.inf)))
    return other


TINY_LM: dict[str, Any] = {"size": "tiny", "level": "word", "lstm": "layer"}
LM: dict[str, Any] = {"size": "ecornn", "lstm": "layer"}
RUNS: list[Any] = [
    pytest.param("lm", TINY_LM, {}, id="tiny lm"),
    pytest.param("lm", TINY_LM, {"budget": "min"}, id="tiny lm in the least memory"),
    pytest.param("speech", {"size": "tiny"}, {}, id="tiny speech"),
    pytest.param("lm", LM, {}, id="lm", marks=pytest.mark.slow),
    pytest.param("lm", LM, {"budget": "min"}, id="lm in the least memory", marks=pytest.mark.slow),
    pytest.param("speech", {}, {}, id="speech", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "sizes", "options"), RUNS)
def test_the_same_curve(name: str, sizes: dict[str, Any], options: dict[str, Any]) -> None:
    workload = build(name, **sizes)
    plain, other = copy.deepcopy(workload.model), nudged(workload.model)
    planned = encore.compile(workload.model, skip="fuse" if sizes.get("size") == "tiny" else (), **options)
    mine, eager = losses(workload, planned), losses(workload, plain)
    assert "recurrent" in encore.report(planned).graphs[0].rewrites
    assert eager[-5:].mean() < 0.9 * eager[:5].mean(), "nothing was learnt"
    apart = float((mine - eager).abs().max())
    if apart > APART * eager[0]:
        assert apart <= DRIFTS * float((losses(workload, other) - eager).abs().max())
