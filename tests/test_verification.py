"""`encore.verify` notices a wrong number, and leaves gradients, buffers, inputs and generators as it found them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import encore
import encore.lower.codegen
from encore.errors import OptionError, VerificationError

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x)).tanh())


@pytest.mark.parametrize("wrong", [aten.mm, aten.tanh_backward, aten.addmm])
def test_a_wrong_result_is_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = encore.lower.calls.callable_for
    spoilt: list[Any] = []

    def callable_for(target: Any) -> Any:
        call = right(target)
        if getattr(target, "overloadpacket", None) is not wrong:
            return call

        def off(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            result.view(-1)[0] += 1e-3
            spoilt.append(target)
            return result

        return off

    monkeypatch.setattr("encore.lower.codegen.callable_for", callable_for)
    model = encore.compile(Net(), lowering="eager")
    with pytest.raises(VerificationError, match="differs from eager's by up to"):
        encore.verify(model, torch.randn(5, 4, requires_grad=True))
    assert spoilt
    within = encore.verify(model, torch.randn(5, 4, requires_grad=True), atol=10)
    assert not within.bit_equal
    assert 0 < within.largest_difference < 10


def test_everything_is_left_as_found() -> None:
    model = encore.compile(Net(), lowering="eager")
    x = torch.randn(5, 4, requires_grad=True)
    model(x).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    copies = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    input_gradient = x.grad
    state = torch.get_rng_state()

    assert encore.verify(model, x).bit_equal

    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, copies[name])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert x.grad is input_gradient
    assert torch.equal(torch.get_rng_state(), state)


def test_everything_is_left_as_found_when_the_step_raises() -> None:
    model = encore.compile(Net(), lowering="eager")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="reduction dim"):
        encore.verify(model, torch.randn(5, 3, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_a_model_that_writes_to_its_input_is_verified_and_the_input_restored() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return self.linear(x)

    x = torch.randn(3, 4)
    before = x.clone()
    assert encore.verify(encore.compile(Writes(), lowering="eager"), x).bit_equal
    assert torch.equal(x, before)


def test_no_step_no_verification() -> None:
    with pytest.raises(OptionError, match="compile it first"):
        encore.verify(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(OptionError, match="there is no step"):
        encore.verify(encore.compile(lambda x: x + 1, lowering="eager"), torch.ones(1, 2))


def test_it_reads_like_a_sentence() -> None:
    model = encore.compile(nn.Linear(2, 2), lowering="eager")
    assert str(encore.verify(model, torch.ones(1, 2))) == "3 tensors equal eager's bit for bit"
