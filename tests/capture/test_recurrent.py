"""torch.nn's recurrent layers, unchanged: one graph, no break, eager's numbers bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_matches_eager, assert_same, gradients
from support.lowerings import in_both_lowerings

# Dynamo looks at `.grad` of what crosses a graph break.
pytestmark = [
    pytest.mark.mostly_eager,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "dropout between layers": {"num_layers": 3, "dropout": 0.4},
    "all at once": {"num_layers": 2, "bidirectional": True, "dropout": 0.4, "batch_first": True},
}
KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@in_both_lowerings("options", OPTIONS, ["all at once"])
def test_a_recurrent_layer(kind: str, options: str, lowering: str) -> None:
    assert_matches_eager(
        KINDS[kind](4, 3, **OPTIONS[options]), torch.randn(5, 2, 4, requires_grad=True), lowering=lowering
    )


def test_a_relu_rnn(lowering: str) -> None:
    assert_matches_eager(nn.RNN(4, 3, nonlinearity="relu"), torch.randn(5, 2, 4, requires_grad=True), lowering=lowering)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_an_lstm_with_projections(lowering: str) -> None:
    assert_matches_eager(nn.LSTM(4, 6, proj_size=3), torch.randn(5, 2, 4, requires_grad=True), lowering=lowering)


@every_kind
def test_an_initial_state_that_needs_gradients(kind: str, lowering: str) -> None:
    state = torch.randn(1, 2, 3, requires_grad=True)
    hidden = (state, torch.randn(1, 2, 3, requires_grad=True)) if kind == "LSTM" else state
    assert_matches_eager(KINDS[kind](4, 3), torch.randn(5, 2, 4), hidden, lowering=lowering)


@every_kind
def test_without_a_batch(kind: str, lowering: str) -> None:
    assert_matches_eager(KINDS[kind](4, 3), torch.randn(5, 4, requires_grad=True), lowering=lowering)


@every_kind
def test_in_double_precision(kind: str, lowering: str) -> None:
    assert_matches_eager(KINDS[kind](4, 3).double(), torch.randn(5, 2, 4).double(), lowering=lowering)


@every_kind
def test_in_eval_mode_with_gradients(kind: str, lowering: str) -> None:
    assert_matches_eager(KINDS[kind](4, 3, num_layers=2, dropout=0.5).eval(), torch.randn(5, 2, 4), lowering=lowering)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_loop_over_a_cell(cell: Any, lowering: str) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            seen = []
            for step in x.unbind(0):
                state = self.cell(step, state)
                seen.append(state[0] if isinstance(state, tuple) else state)
            return torch.stack(seen)

    assert_matches_eager(Loop(), torch.randn(4, 2, 4, requires_grad=True), lowering=lowering)


def test_inside_a_larger_model(lowering: str) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.encoder = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
            self.decoder = nn.GRU(6, 5, batch_first=True)
            self.head = nn.Linear(5, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            encoded, _ = self.encoder(self.embedding(tokens))
            decoded, _ = self.decoder(encoded)
            return self.head(decoded)

    assert_matches_eager(Tagger(), torch.randint(0, 9, (2, 6)), lowering=lowering)


@every_kind
def test_truncated_backpropagation_with_a_detached_state(kind: str, lowering: str) -> None:
    torch.manual_seed(3)
    plain = KINDS[kind](4, 3)
    planned = encore.compile(KINDS[kind](4, 3), lowering=lowering)
    planned.load_state_dict(plain.state_dict())
    chunks = torch.randn(3, 5, 2, 4)

    def train(model: nn.Module) -> dict[str, Tensor]:
        state: Any = None
        for chunk in chunks:
            output, state = model(chunk) if state is None else model(chunk, state)
            output.square().sum().backward()
            state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
        return gradients(model)

    assert_same(train(planned), train(plain), lowering)
