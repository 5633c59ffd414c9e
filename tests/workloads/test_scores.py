"""Every workload learns: a short run in plain PyTorch brings its score on held-out data well above where it began."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from encore.workloads import TINY_SIZES, WORKLOADS, Workload, build, tiny

every_workload = pytest.mark.parametrize("name", sorted(WORKLOADS))

LEARNT: dict[str, tuple[int, str, Callable[[float, float], bool]]] = {
    "lm": (40, "perplexity", lambda before, after: after < before / 2),
    "nmt": (150, "BLEU", lambda before, after: after > before + 20),
    "resnet": (40, "accuracy", lambda before, after: after > before + 0.3),
    "speech": (40, "frame accuracy", lambda before, after: after > before + 0.3),
    "transformer": (40, "perplexity", lambda before, after: after < before / 2),
}
"""Steps of training, and by how much what metric gets better."""

LARGER = {"nmt": {"batch_size": 32}}
"""Sizes above the tiny ones, where those take too long to get anywhere."""


def train(workload: Workload, steps: int) -> None:
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=workload.learning_rate)
    for index in range(steps):
        optimizer.zero_grad()
        workload.model(*workload.batch(index)).backward()
        optimizer.step()


@every_workload
def test_training_improves_the_score(name: str) -> None:
    steps, metric, is_better = LEARNT[name]
    workload = build(name, **{**TINY_SIZES[name], **LARGER.get(name, {})})
    before = workload.score(workload.model)[metric]
    train(workload, steps)
    after = workload.score(workload.model)[metric]
    assert is_better(before, after), (before, after)


@every_workload
def test_scoring_leaves_no_trace(name: str) -> None:
    workload = tiny(name)
    workload.model.train()
    next(module for module in workload.model.modules() if not list(module.children())).eval()
    modes = [module.training for module in workload.model.modules()]
    weights = copy.deepcopy(workload.model.state_dict())
    generator = torch.get_rng_state()
    first = workload.score(workload.model)
    if workload.sample:
        assert workload.sample(workload.model).strip()
    assert [module.training for module in workload.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(weights[key], value) for key, value in workload.model.state_dict().items())
    assert torch.is_grad_enabled()
    assert workload.score(copy.deepcopy(workload.model)) == first
