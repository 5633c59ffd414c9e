"""What Encore does most, small enough for any version of PyTorch: `make test-torch VERSION=...` runs these tests in an
environment of its own."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import encore
from support.compare_with_eager import assert_matches_eager, session_of
from support.cut_models import HookedBlocks

pytestmark = pytest.mark.slow  # other tests say the same of the version that Encore is developed with
PACKAGE = Path(encore.__file__).parent


class Translator(nn.Module):
    """A Transformer layer with dropout, between an embedding and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.leave = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.leave(self.layer(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Tagger(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.leave = kind(8, 16, num_layers=2, dropout=0.2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layer(x)[0]).sum()


def perceptron() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers), torch.randn(256, 64, requires_grad=True)


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)), torch.randn(4, 3, 16, 16)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "Transformer": lambda: (Translator(), torch.randint(50, (8, 12))),
    "torch.nn.LSTM": lambda: (Tagger(nn.LSTM), torch.randn(7, 4, 8)),
    "torch.nn.GRU": lambda: (Tagger(nn.GRU), torch.randn(7, 4, 8)),
    "encore.nn.LSTM": lambda: (Tagger(encore.nn.LSTM), torch.randn(7, 4, 8)),
}
ROUNDED = {"torch.nn.GRU", "encore.nn.LSTM"}
"""Layers whose last bits differ from eager's in the eager lowering, too (docs/limits.md)."""
CASES = [
    (name, lowering) for name in MODELS for lowering in ("eager", "fused") if name not in ROUNDED or lowering == "fused"
]


def modules() -> list[str]:
    """Every module of the package, without those that import hosts and Triton, which may be missing here."""
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
    skipped = ("integrations", "gpu", "scores_gpu", "__main__")
    return [".".join(path.parts) for path in paths if not set(skipped) & set(path.parts)]


@pytest.mark.parametrize("module", [name for name in modules() if "torch_private" in name])
def test_private_names_are_there(module: str) -> None:
    """Attributes of `torch` that a `torch_private` reads when it runs, next to those that it imports at once."""
    loaded: Any = importlib.import_module(module)
    tree = ast.parse(Path(loaded.__file__).read_text())
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for chain in sorted(chain for chain in chains if re.fullmatch(r"(torch|_C)(\.\w+)+", chain)):
        value = loaded
        for name in chain.split("."):
            assert hasattr(value, name), f"{chain} has no {name} in PyTorch {torch.__version__}"
            value = getattr(value, name)


def test_every_module_is_imported() -> None:
    for name in modules():
        importlib.import_module(name)


@pytest.mark.parametrize(("name", "lowering"), CASES)
def test_a_model_trains_as_in_eager(name: str, lowering: str) -> None:
    model, batch = MODELS[name]()
    model(batch)  # lazy layers
    planned = assert_matches_eager(model, batch, lowering=lowering)
    assert encore.verify(planned, batch)
    assert lowering == "eager" or any(graph.kernels for graph in encore.report(planned).graphs)


@pytest.mark.parametrize(("budget", "lowering"), [("min", "eager"), ("70%", "fused")])
def test_a_budget_is_kept(budget: str, lowering: str) -> None:
    model, batch = Translator(), torch.randint(50, (16, 12))
    planned = encore.compile(model, budget=budget, lowering=lowering)

    def step() -> None:
        planned(batch).backward()

    for _ in range(2):
        step()
        model.zero_grad(set_to_none=True)
    measured, report = encore.measure(step).step_peak, encore.report(planned)
    assert report.planned.step_peak < report.unplanned.step_peak
    assert measured <= report.planned.step_peak <= 1.01 * measured


def test_a_step_of_several_graphs_keeps_its_budget() -> None:
    model, batch = HookedBlocks(), torch.randn(64, 32)
    planned = assert_matches_eager(model, batch, lowering="eager", graphs=None, steps=3)
    assert len(session_of(planned).graphs) > 1


def test_another_length_gets_a_plan_of_its_own() -> None:
    model, _ = perceptron()
    planned = encore.compile(model, lowering="eager")
    for rows in (16, 24, 16):
        planned(torch.randn(rows, 64)).sum().backward()
    assert len(session_of(planned).graphs) == 2


def test_gradients_leave_before_the_end_of_backward() -> None:
    batch, layers = torch.randn(32, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    arrived: list[int] = []
    for number, layer in enumerate(layers):
        assert isinstance(layer, nn.Linear)
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: arrived.append(number))
    planned = encore.compile(layers, lowering="eager")
    for _ in range(2):
        arrived.clear()
        planned(batch).sum().backward()
        assert arrived == [5, 4, 3, 2, 1, 0]


def test_a_second_derivative_is_rejected() -> None:
    model, batch = perceptron()
    planned = encore.compile(model, lowering="eager")
    (gradient,) = torch.autograd.grad(planned(batch).sum(), batch, create_graph=True)
    with pytest.raises(encore.EncoreError, match="double backward"):
        gradient.square().sum().backward()


def test_an_estimate_is_what_is_planned() -> None:
    model, batch = perceptron()
    estimate = encore.estimate(model, batch)
    planned = encore.compile(model)
    planned(batch).sum().backward()
    assert estimate.unplanned.step_peak == encore.report(planned).unplanned.step_peak


def test_a_scan_differentiates_as_the_loop() -> None:
    weight, steps = torch.randn(4, 4, requires_grad=True), torch.randn(50, 3, 4)

    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.tanh(carry @ weight + x)
        return carry, carry

    carry, expected = torch.zeros(3, 4), []
    for x in steps:
        carry, y = step(carry, x)
        expected.append(y)
    (wanted,) = torch.autograd.grad(torch.stack(expected).sum(), weight)
    last, found = encore.scan(step, torch.zeros(3, 4), steps, budget="2KiB")
    assert torch.equal(last, carry)
    assert torch.allclose(torch.autograd.grad(found.sum(), weight)[0], wanted, rtol=1e-4)


def test_torch_compile_takes_the_backend() -> None:
    model, batch = perceptron()
    compiled = torch.compile(model, backend="encore", options={"budget": "70%"})
    compiled(batch).sum().backward()
    assert encore.report(compiled).planned.step_peak < encore.report(compiled).unplanned.step_peak
