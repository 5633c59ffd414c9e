"""Random small models: the planned step equals eager bit for bit, its schedule is legal, its prediction holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import encore
from encore.api import compiled_call
from encore.schedule import replay
from random_models import MODEL_LAYERS, Layer, RandomModel

SMALL_CHANGE = 512
"""Bytes that one percent cannot express at such sizes."""

models = given(
    layers=st.lists(MODEL_LAYERS, min_size=1, max_size=7),
    batch=st.integers(1, 3),
    steps=st.integers(1, 6),
    width=st.integers(1, 6),
    input_gradient=st.booleans(),
)


def check_promises(layers: list[Layer], batch: int, steps: int, width: int, input_gradient: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    if batch * steps == 1:
        steps = 2  # batch norm wants more than one value a channel
    model = encore.compile(RandomModel([("linear", 4), *layers], width, steps))
    x = torch.randn(batch, steps, width, requires_grad=input_gradient)

    assert encore.verify(model, x).bit_equal

    for captured in compiled_call(model).session.graphs:
        replay(captured.plan.schedule)

    def step() -> None:
        outputs = model(x)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    model.zero_grad()
    x.grad = None
    step()
    model.zero_grad()
    x.grad = None
    measured = encore.measure(step).step_peak
    predicted = encore.report(model).planned.step_peak
    assert measured <= predicted <= measured * 1.01 + SMALL_CHANGE


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@models
def test_random_models_keep_every_promise(
    layers: list[Layer], batch: int, steps: int, width: int, input_gradient: bool
) -> None:
    check_promises(layers, batch, steps, width, input_gradient)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@models
def test_many_random_models_keep_every_promise(
    layers: list[Layer], batch: int, steps: int, width: int, input_gradient: bool
) -> None:
    check_promises(layers, batch, steps, width, input_gradient)


# -- what random models have found -----------------------------------------------------------------------------------


def predicted_and_measured(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    encore.compile(model)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        measured = encore.measure(lambda: model(x).sum().backward()).step_peak
    return encore.report(model).planned.step_peak, measured


def test_the_copy_of_an_inputs_gradient_in_another_layout_is_predicted() -> None:
    """Autograd copies the gradient of any leaf whose strides differ from the leaf's, not only a parameter's."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.transpose(1, 2))

    predicted, measured = predicted_and_measured(Turned(), torch.randn(4, 64, 32, requires_grad=True))
    assert measured <= predicted <= 1.01 * measured + SMALL_CHANGE


def test_batch_norm_of_a_transposed_value_between_two_linear_layers_runs() -> None:
    """The fake kernel of batch norm keeps its input's strides, the real one returns a contiguous result."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.linear = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))

    assert encore.verify(encore.compile(Normed()), torch.randn(3, 5, 8)).bit_equal
