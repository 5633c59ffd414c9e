"""Two threads that share a layer's work: the same bits every time, errors told to the caller, nothing left behind."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import encore
from encore.rnn import layer, tuning
from encore.rnn.lanes import TwoLanes
from encore.rnn.tuning import Layout
from support.recurrent_pairs import KINDS

pytestmark = pytest.mark.usefixtures("own_layers")

LAYOUT = Layout("packed", 64, 2)


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


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("stash", ["fast", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time(kind: str, stash: str) -> None:
    module = getattr(encore.nn, kind)(48, 96, stash=stash)
    x = torch.randn(80, 16, 48, requires_grad=True)
    first = gradients(module, x)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(gradients(module, x), first, strict=True))
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
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


@pytest.mark.usefixtures("two_threads")
def test_without_gradients_and_in_inference() -> None:
    module = encore.nn.LSTM(48, 96)
    x = torch.randn(80, 16, 48)
    expected = gradients(module, x.requires_grad_())[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), tuning.forced(LAYOUT):
            assert torch.equal(module(x)[0], expected)


@pytest.mark.usefixtures("two_threads")
def test_an_error_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    module = encore.nn.LSTM(48, 96, stash="lean")
    x = torch.randn(80, 16, 48, requires_grad=True)
    with tuning.forced(LAYOUT):
        output = module(x)[0]

    def refuse(*_: Any) -> None:
        raise RuntimeError("no room for gates")

    with monkeypatch.context() as patch:
        patch.setattr(layer.kernels_for(x.device), "lstm_rebuild", refuse)
        with pytest.raises(RuntimeError, match="no room for gates"):
            output.sum().backward(retain_graph=True)
    assert torch.get_num_threads() == 2
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_sums_are_added_up_in_order() -> None:
    order: list[int] = []
    with TwoLanes() as lanes:
        for number in range(200):
            lanes.later(lambda number=number: order.append(number), "sum")  # type: ignore[misc]
    assert order == list(range(200))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_lanes_of_its_own() -> None:
    """Threads do not survive a fork: the child asks for new ones. (Products are left out: OpenMP may not be forked.)"""
    with TwoLanes() as lanes:
        lanes.later(lambda: None)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        with TwoLanes() as lanes:
            lanes.later(lambda: done.append(1))
        os._exit(0 if done == [1] else 1)
    assert os.waitpid(child, 0)[1] == 0
