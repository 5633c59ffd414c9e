"""Every workload learns: a short run in plain PyTorch brings its score on held-out data well above where it began."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from torch import nn

import encore
from benchmarks.workloads import WORKLOADS, Workload, build, tiny

ONE_OF_A_KIND = ("deepspeech2", "lm", "nin", "nmt", "transformer")
"""Trained in `make test`; the others learn in the same way, and do in `make test-all`."""
every_workload = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_OF_A_KIND else pytest.mark.slow) for name in sorted(WORKLOADS)]
)

Better = Callable[[float, float], bool]


def halved(before: float, after: float) -> bool:
    return after < before / 2


def higher_by(amount: float) -> Better:
    return lambda before, after: after > before + amount


LEARNT: dict[str, tuple[int, str, Better]] = {
    "alexnet": (60, "accuracy", higher_by(0.3)),
    "deepspeech2": (160, "label error rate", halved),
    "inception": (40, "accuracy", higher_by(0.3)),
    "lm": (40, "perplexity", halved),
    "nin": (80, "accuracy", higher_by(0.3)),
    "nmt": (100, "exact match", higher_by(0.5)),
    "overfeat": (30, "accuracy", higher_by(0.3)),
    "resnet": (40, "accuracy", higher_by(0.3)),
    "resnet152": (60, "accuracy", higher_by(0.3)),
    "speech": (40, "frame accuracy", higher_by(0.3)),
    "transformer": (40, "perplexity", halved),
    "vgg16": (80, "accuracy", higher_by(0.3)),
}
"""Steps of a round of training, and by how much what metric gets better within `MOST_ROUNDS` of them."""
MOST_ROUNDS = 4

LARGER = {"nmt": {"batch_size": 64, "hidden": 64, "layers": 1, "steps": 12}}
"""Sizes above the tiny ones, where those take too long to get anywhere."""


def train(workload: Workload, steps: int, rounds: int = 1) -> Iterator[None]:
    """Train in rounds of so many steps; how fast a network learns depends on how the processor rounds."""
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=workload.learning_rate)
    for number in range(rounds):
        for index in range(steps):
            optimizer.zero_grad()
            workload.model(*workload.batch(number * steps + index)).backward()
            optimizer.step()
        yield


@every_workload
def test_training_improves_the_score(name: str) -> None:
    steps, metric, is_better = LEARNT[name]
    workload = build(name, size="tiny", **LARGER.get(name, {}))
    before = workload.score(workload.model)[metric]
    scores = (workload.score(workload.model)[metric] for _ in train(workload, steps, MOST_ROUNDS))
    assert any(is_better(before, after) for after in scores)


@pytest.mark.slow
def test_diary_entries_never_seen_are_translated_word_for_word() -> None:
    workload = build("nmt", batch_size=32, hidden=96, layers=1, steps=26, task="diary")
    list(train(workload, 200))
    found = workload.score(workload.model)
    assert found["exact match"] > 0.9
    assert found["BLEU"] > 95
    assert workload.sample is not None
    assert workload.sample(workload.model).count("reference") <= 1


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


def test_a_compiled_model_is_scored_like_its_plain_twin() -> None:
    workload = tiny("nmt")
    plain = workload.score(workload.model)
    model = encore.compile(workload.model, lowering="eager")
    model(*workload.batch(0)).backward()
    assert workload.score(model) == plain
    assert workload.score(cast(nn.Module, torch.compile(tiny("nmt").model, backend="eager"))) == plain
