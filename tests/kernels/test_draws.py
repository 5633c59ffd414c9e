"""Coins flipped many at a time are PyTorch's own, and leave its generator where PyTorch would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import encore
from encore.kernels import build, draws


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    before=st.integers(0, 1300),
    count=st.integers(0, 5000),
    p=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 0.9, 2.0**-53, 1 - 2.0**-53])),
)
def test_the_coins_and_the_state_are_pytorchs(seed: int, before: int, count: int, p: float) -> None:
    generator = torch.default_generator
    with torch.random.fork_rng(devices=[]):
        generator.manual_seed(seed)
        torch.empty(before, dtype=torch.int32).random_()  # one output each: an odd number splits a pair between turns
        start = generator.get_state()
        expected, state = torch.empty(count, dtype=torch.bool).bernoulli_(p), generator.get_state()
        following = torch.randn(3)
        generator.set_state(start)
        found = draws.flip_coins_(torch.empty(count, dtype=torch.bool), p)
        assert torch.equal(found, expected)
        assert torch.equal(generator.get_state(), state)
        assert torch.equal(torch.randn(3), following)


def test_coins_lie_in_the_order_of_memory() -> None:
    like = torch.empty(40, 30).t()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = torch.empty_like(like).bernoulli_(0.7).bool()
        torch.manual_seed(3)
        assert torch.equal(draws.flip_coins_(torch.empty_like(like, dtype=torch.bool), 0.7), expected)


def test_without_a_compiler_pytorch_flips_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(draws, "_compiled", draws._compiled.__wrapped__)
    monkeypatch.setattr("encore.kernels.draws.library", build.library.__wrapped__)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = torch.empty(2000, dtype=torch.bool).bernoulli_(0.7)
        torch.manual_seed(3)
        assert torch.equal(draws.flip_coins_(torch.empty(2000, dtype=torch.bool), 0.7), expected)


def test_tensors_without_memory_get_none() -> None:
    with FakeTensorMode():
        found = draws.flip_coins_(torch.empty(2000, dtype=torch.bool), 0.7)
        assert found.shape == (2000,)


def test_dropout_is_estimated() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    estimate = encore.estimate(model, torch.randn(32, 64))
    assert estimate.unplanned.step_peak > 0
