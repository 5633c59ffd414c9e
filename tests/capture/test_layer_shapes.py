"""Dynamo gets the shapes of recurrent layers without running their time steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import encore
from encore.api import compiled_call
from encore.capture.torch_private import recurrent_shapes


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


LAYERS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(5, 7, num_layers=2, bidirectional=True),
    "projected lstm": lambda: nn.LSTM(5, 7, proj_size=3, batch_first=True),
    "gru": lambda: nn.GRU(5, 7, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(5, 7, num_layers=3, nonlinearity="relu", dropout=0.5),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_shapes_are_those_of_the_layer(name: str) -> None:
    layer = LAYERS[name]()
    x = torch.randn(11, 11, 5)
    output, states = layer(x)
    expected = [output, *(states if isinstance(states, tuple) else [states])]
    counts = []
    for steps in (11, 400):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = LAYERS[name]()
            given = torch.empty(*((11, steps) if layer.batch_first else (steps, 11)), 5)
            with recurrent_shapes(), enable_python_dispatcher(), Operators() as operators:
                output, states = fake(given)
        assert mode is not None
        counts.append(operators.count)
        found = [output, *(states if isinstance(states, tuple) else [states])]
        if steps == 11:
            assert [one.shape for one in found] == [one.shape for one in expected]
            assert [one.stride() for one in found] == [one.stride() for one in expected]
            assert all(one.requires_grad for one in found)
    assert counts[0] == counts[1]


def test_other_code_gets_the_layers_themselves() -> None:
    operator = torch.ops.aten.lstm.input
    before = dict(operator.py_kernels)
    layer = encore.compile(nn.LSTM(4, 4), lowering="eager")
    x = torch.randn(9, 2, 4)
    layer(x)[0].sum().backward()
    assert compiled_call(layer).session.graphs
    assert operator.py_kernels == before
