"""Layers on several threads: the same bits every time, from several callers, and nothing left behind by an error."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import encore
from encore.rnn import layer, tuning
from encore.rnn.tuning import LayerLayout
from support.recurrent_pairs import KINDS

pytestmark = pytest.mark.usefixtures("own_layers", "two_threads")

LAYOUT = LayerLayout("packed", 64)


def gradients(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    with tuning.forced(LAYOUT):
        output = module(x)[0]
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *module.parameters()])]


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("stash", ["fast", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time(kind: str, stash: str) -> None:
    module = getattr(encore.nn, kind)(48, 96, stash=stash)
    x = torch.randn(80, 16, 48, requires_grad=True)
    first = gradients(module, x)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(gradients(module, x), first, strict=True))
    assert torch.get_num_threads() == 2


def test_several_callers_at_once() -> None:
    module = encore.nn.LSTM(48, 96)
    inputs = [torch.randn(80, 16, 48, requires_grad=True) for _ in range(4)]
    alone = [gradients(module, x) for x in inputs]
    found: dict[int, list[Tensor]] = {}

    def run(number: int) -> None:
        torch.set_num_threads(2)
        found[number] = gradients(module, inputs[number])

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for number, expected in enumerate(alone):
        assert all(torch.equal(a, b) for a, b in zip(found[number], expected, strict=True))


def test_without_gradients_and_in_inference() -> None:
    module = encore.nn.LSTM(48, 96)
    x = torch.randn(80, 16, 48)
    expected = gradients(module, x.requires_grad_())[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), tuning.forced(LAYOUT):
            assert torch.equal(module(x)[0], expected)


def test_an_error_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    module = encore.nn.LSTM(48, 96, stash="lean")
    x = torch.randn(80, 16, 48, requires_grad=True)
    with tuning.forced(LAYOUT):
        output = module(x)[0]

    def fail(*_: Any) -> None:
        raise RuntimeError("no room for gates")

    with monkeypatch.context() as patch:
        patch.setattr(layer.kernels_for(x.device), "rebuild", fail)
        with pytest.raises(RuntimeError, match="no room for gates"):
            output.sum().backward(retain_graph=True)
    assert torch.get_num_threads() == 2
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
