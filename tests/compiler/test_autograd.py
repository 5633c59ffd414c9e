"""Backward in every order and number users ask for, and errors in the middle of a step."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_same, backward, gradients, run_step, session_of

pytestmark = pytest.mark.mostly_eager


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.hidden(self.embed(words))).tanh()
        return self.out(F.dropout(hidden, 0.2))


def pair(lowering: str) -> tuple[Net, Net]:
    """A compiled model and its equal in eager."""
    eager = Net()
    return encore.compile(copy.deepcopy(eager), lowering=lowering), eager


def words(seed: int = 0, rows: int = 6) -> Tensor:
    return torch.randint(0, 10, (rows,), generator=torch.Generator().manual_seed(seed))


def both(models: tuple[Net, Net], action: Callable[[Net], Any]) -> Any:
    """Do the same to both, from one seed; compare gradients and buffers; return the compiled model's result."""
    found = []
    for model in models:
        torch.manual_seed(3)
        result = action(model)
        tensors = gradients(model) | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        found.append((result, tensors | {"generator": torch.get_rng_state()}))
    assert_same(found[0][1], found[1][1], session_of(models[0]).options.lowering)
    assert session_of(models[0]).forwards_run > 0
    return found[0][0]


def loss_of(model: Net, seed: int = 0, rows: int = 6) -> Tensor:
    return F.cross_entropy(model(words(seed, rows)), words(seed, rows) % 4)


# -- orders ----------------------------------------------------------------------------------------------------------


def test_gradients_accumulate_over_micro_batches(lowering: str) -> None:
    def accumulate(model: Net) -> None:
        for micro_batch in range(3):
            (loss_of(model, micro_batch) / 3).backward()

    both(pair(lowering), accumulate)


def test_backward_twice_through_a_retained_graph(lowering: str) -> None:
    def twice(model: Net) -> None:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()

    both(pair(lowering), twice)


def test_a_graph_is_retained_after_steps_that_did_not(lowering: str) -> None:
    def thrice(model: Net) -> None:
        loss_of(model).backward()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()

    both(pair(lowering), thrice)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards(order: tuple[int, ...], lowering: str) -> None:
    def run(model: Net) -> None:
        losses = [loss_of(model, seed, rows) for seed, rows in ((0, 6), (1, 6), (2, 4))]
        for index in order:
            losses[index].backward()

    both(pair(lowering), run)


def test_one_backward_through_several_forwards(lowering: str) -> None:
    both(pair(lowering), lambda model: (loss_of(model, 0) * loss_of(model, 1) + loss_of(model, 2)).backward())


def test_the_output_of_one_call_feeds_the_next(lowering: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).tanh()

    planned = encore.compile(function, lowering=lowering)
    found = []
    for call in (planned, function):
        torch.manual_seed(0)
        x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        y = x
        for _ in range(4):
            y = call(y, weight)
        backward([y])
        found.append((y, x.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert_same({"it": ours}, {"it": theirs}, lowering)


def test_a_forward_that_is_dropped_leaves_nothing(lowering: str) -> None:
    model, _ = pair(lowering)
    loss_of(model).backward()
    model.zero_grad()

    def drop() -> None:
        loss_of(model)

    drop()
    assert encore.measure(drop).left == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_leaves_its_gradients_and_nothing_else(lowering: str) -> None:
    model, _ = pair(lowering)
    loss_of(model).backward()
    model.zero_grad()
    left = encore.measure(lambda: loss_of(model).backward()).left
    assert left == sum(parameter.nbytes for parameter in model.parameters())


def test_autograd_grad_and_frozen_parameters(lowering: str) -> None:
    def run(model: Net) -> tuple[Tensor, ...]:
        model.hidden.requires_grad_(False)
        found = torch.autograd.grad(loss_of(model), [model.embed.weight, model.out.bias])
        loss_of(model).backward()
        assert model.hidden.weight.grad is None
        model.hidden.requires_grad_(True)
        loss_of(model).backward()
        assert model.hidden.weight.grad is not None
        return found

    both(pair(lowering), run)


def test_double_backward_says_that_it_is_not_supported(lowering: str) -> None:
    model, _ = pair(lowering)
    first = torch.autograd.grad(loss_of(model), model.hidden.weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"(?i)double backward|twice differentiable"):
        first.square().sum().backward()
    loss_of(model).backward()


# -- threads ---------------------------------------------------------------------------------------------------------


def in_thread(action: Callable[[], Any]) -> Any:
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(action())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    if failed:
        raise failed[0]
    return found[0]


@pytest.mark.parametrize("first", ["here", "there"])
def test_compiled_in_one_thread_and_run_in_another(first: str, lowering: str) -> None:
    models = pair(lowering)
    for where in (first, "there" if first == "here" else "here"):
        both(models, lambda model, call=loss_of, where=where: do(where, lambda: call(model).backward()))  # type: ignore[misc]


def do(where: str, action: Callable[[], Any]) -> Any:
    return action() if where == "here" else in_thread(action)


def test_forward_here_and_backward_there(lowering: str) -> None:
    def run(model: Net) -> None:
        loss = loss_of(model)
        in_thread(loss.backward)

    both(pair(lowering), run)


def test_two_models_train_side_by_side(lowering: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).relu().square()

    expected: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for seed in range(2):
        x, weight = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True)
        expected[seed] = ((x, weight), run_step(function, (x, weight)))
    barrier = threading.Barrier(2)

    def train(seed: int) -> None:
        planned = encore.compile(function, lowering=lowering)
        barrier.wait(60)
        for _ in range(3):
            x, weight = expected[seed][0]
            weight = weight.detach().clone().requires_grad_()
            output = planned(x, weight)
            backward([output])
            found[seed] = (output.detach(), weight.grad)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed, (_, want) in expected.items():
        have = {"output": found[seed][0], "gradient of input[0][1]": found[seed][1]}
        assert_same(have, {name: want[name] for name in have}, lowering)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_in_forward_leaks_nothing_and_the_next_step_works(lowering: str) -> None:
    models = pair(lowering)
    both(models, lambda model: loss_of(model).backward())
    bad = torch.tensor([1, 2, 3, 4, 5, 99])

    def fail() -> None:
        with pytest.raises(IndexError, match="out of range"):
            models[0](bad)

    fail()
    gc.collect()
    assert encore.measure(lambda: (fail(), gc.collect())).left == 0  # type: ignore[func-returns-value]
    with pytest.raises(IndexError, match="out of range"):
        models[1](bad)
    both(models, lambda model: (model.zero_grad(), loss_of(model).backward()))  # type: ignore[func-returns-value]


class Failing(torch.autograd.Function):
    """Identity whose backward fails on demand."""

    wanted = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.wanted:
            raise ValueError("backward failed on demand")
        return gradient


@pytest.mark.parametrize("where", ["after the model", "parameter hook"])
def test_an_error_in_backward_leaks_nothing_and_the_next_step_works(
    where: str, monkeypatch: pytest.MonkeyPatch, lowering: str
) -> None:
    models = pair(lowering)

    def hook(gradient: Tensor) -> None:
        if Failing.wanted:
            raise ValueError("backward failed on demand")

    if where == "parameter hook":
        for model in models:
            model.hidden.weight.register_hook(hook)

    def step(model: Net) -> weakref.ref[Tensor]:
        model.zero_grad()
        output = model(words())
        loss = F.cross_entropy(Failing.apply(output) if where == "after the model" else output, words() % 4)
        loss.backward()
        return weakref.ref(output)

    both(models, step)
    monkeypatch.setattr(Failing, "wanted", True)

    def fail(model: Net) -> None:
        with pytest.raises(ValueError, match="on demand"):
            step(model)
        model.zero_grad()
        gc.collect()

    # The latest error may hold on to its step, in eager too; what counts is that failures do not add up.
    def fail_often(times: int) -> None:
        for _ in range(times):
            fail(models[0])

    fail(models[0])
    assert encore.measure(lambda: fail_often(1)).left == encore.measure(lambda: fail_often(2)).left
    for _ in range(4):
        fail(models[1])
    monkeypatch.setattr(Failing, "wanted", False)
    reference = both(models, step)
    assert reference() is None


def test_an_output_that_the_plan_laid_into_another_tensor_is_no_view(lowering: str) -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = one(x.tanh()) + other(x.tanh())  # added into the product, of which it is a view
        return made

    results = []
    for called in (function, encore.compile(function, lowering=lowering)):
        x = torch.arange(160.0).view(4, 5, 8).div(160).requires_grad_()
        made = called(x)
        assert made._base is None
        made += 1
        made.square().sum().backward()
        results.append((made.detach(), x.grad))
    for have, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(have, want)
