"""Sigmoid and tanh of the compiled steps, which are written out for some processors, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from encore.kernels import BuildError
from encore.rnn import native
from encore.rnn.sequence import dense_walk
from encore.rnn.steps import ForwardSteps

pytestmark = pytest.mark.usefixtures("own_layers")

LAST_PLACE = 2.0**-23


def activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """What an LSTM's step makes of these numbers: sigmoid in the gate i, tanh in g."""
    try:
        native.recurrent_library()
    except BuildError as error:
        pytest.skip(str(error))
    count = x.numel()
    gates, state = torch.empty(1, 4 * count), torch.zeros(3, 1, count)
    inputs = x.repeat(4).view(1, 4 * count)
    (chunk,) = dense_walk(1, 1, False, 1).chunks
    bias, output, cells = torch.zeros(4 * count), torch.empty(1, count), torch.empty(1, count)
    before, after, cell = state
    steps = ForwardSteps(chunk, inputs, bias, None, before, after, output, gates, cell=cell, cells=cells)
    native.forward("lstm", steps)
    return gates[0, :count], gates[0, 2 * count : 3 * count]


def test_within_two_units_in_the_last_place() -> None:
    near, far = torch.linspace(-1, 1, 100_003), torch.linspace(-85, 85, 100_003)
    x = torch.cat((near, far, torch.logspace(-30, 0, 1001), -torch.logspace(-30, 0, 1001)))
    for found, exact in zip(activations(x), (x.double().sigmoid(), x.double().tanh()), strict=True):
        off = ((found.double() - exact) / exact).abs()
        off[exact == 0] = found[exact == 0].double().abs()
        assert off.max() <= 2 * LAST_PLACE


def test_ends_and_holes() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 200.0, -200.0])
    sigmoid, tanh = activations(x)
    torch.testing.assert_close(sigmoid, x.sigmoid(), rtol=0, atol=2e-38, equal_nan=True)
    torch.testing.assert_close(tanh, x.tanh(), rtol=0, atol=0, equal_nan=True)
