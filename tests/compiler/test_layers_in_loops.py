"""Code that Dynamo gives up whole: with a budget, layers that it calls are graphs of the step."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from encore.api import compiled_call
from support.rounding import assert_gradients_as_accurate

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Memory block of unknown size.*:UserWarning"),
]


class Tossing(nn.Module):
    """Layers of PyTorch's own in a loop with a coin flip."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.encoder = nn.GRU(16, 16)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, 0.0)
        self.cell = nn.GRUCell(16, 16)
        self.out = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, words: Tensor) -> Tensor:
        embedded = self.embedding(words)
        encoded, last = self.encoder(embedded)
        encoded, state = self.mix(encoded), last[0]
        written = []
        for step in range(4):
            state = self.cell(embedded[step] if random.random() < 0.5 else encoded[step], state)
            written.append(self.out(state))
        return torch.stack(written).square().mean()


def step(model: Callable[[Tensor], Any], words: Tensor) -> Any:
    random.seed(0)
    model(words).backward()


def calls_of(model: nn.Module, words: Tensor, steps: int = 4) -> int:
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        step(model, words)
    return len(compiled_call(model).session.step.calls)


def test_layers_are_calls_of_the_step(lowering: str) -> None:
    torch.manual_seed(0)
    plain, words = Tossing(), torch.randint(10, (20, 8))
    eager = []
    for _ in range(2):
        plain.zero_grad(set_to_none=True)
        eager.append(encore.measure(functools.partial(step, plain, words)).step_peak)
    model = encore.compile(copy.deepcopy(plain), budget="min", lowering=lowering)
    assert calls_of(model, words) == 1 + 1 + 4 + 4
    model.zero_grad(set_to_none=True)
    peak = encore.measure(functools.partial(step, model, words)).step_peak
    planned = encore.report(model).planned.step_peak
    assert peak <= 0.7 * eager[1]
    assert peak <= planned
    assert_gradients_as_accurate(model, plain, lambda one: step(one, words))


def test_another_compiled_function_does_not_hide_them() -> None:
    words = torch.randint(10, (20, 8))
    others = torch.compile(Tossing(), backend="eager")
    step(others, words)
    model = encore.compile(Tossing(), budget="min", lowering="eager")
    assert calls_of(model, words) == 10
    seen: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(module)
        return module.forward

    step(torch.compile(Tossing(), backend=backend), words)
    assert not seen
    assert calls_of(model, words) == 10
