"""Small recurrent layers as users get them: where nothing was tuned, `encore.nn.LSTM` leaves them to `torch.nn`."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import encore
from encore.rnn import tuning
from support.captured_graphs import drop_gradients, train_step
from support.compare_with_eager import session_of
from support.recurrent_pairs import everything, pair
from support.rounding import assert_gradients_as_accurate


@pytest.fixture(autouse=True)
def _nothing_was_tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measurements of other runs may lie in the cache that tests share."""
    monkeypatch.setattr(tuning, "measured", lambda size: {})
    tuning.forget()
    yield
    tuning.forget()


def saved_by(output: Tensor) -> str:
    assert output.grad_fn is not None
    return type(output.grad_fn).__name__


class Tagger(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0]).square().mean()


def test_a_small_lstm_is_torch_nns_bit_for_bit() -> None:
    theirs, ours = pair("LSTM", 12, 24)
    x = torch.randn(6, 20, 12, requires_grad=True)
    assert saved_by(ours(x)[0]) == saved_by(theirs(x)[0])
    for found, expected in zip(everything(ours, x, wanted=[x]), everything(theirs, x, wanted=[x]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("stash", "batch", "steps", "kind"),
    [("lean", 20, 6, "LSTM"), (3, 20, 6, "LSTM"), ("fast", 2, 300, "LSTM"), ("fast", 20, 6, "GRU")],
)
def test_other_layers_run_on_operators_of_their_own(stash: str | int, batch: int, steps: int, kind: str) -> None:
    theirs, ours = pair(kind, 12, 24, stash=stash)
    x = torch.randn(steps, batch, 12)
    assert saved_by(ours(x)[0]) != saved_by(theirs(x)[0])


@pytest.mark.parametrize("room", [nn, encore.nn], ids=["torch.nn", "encore.nn"])
def test_a_small_lstm_in_a_compiled_model(room: object, lowering: str) -> None:
    eager = Tagger(room.LSTM(12, 24))  # type: ignore[attr-defined]
    model, x = encore.compile(copy.deepcopy(eager), lowering=lowering, budget="1GiB"), torch.randn(6, 20, 12)
    for one in (model, eager):
        train_step(one, x)
    assert_gradients_as_accurate(model, eager, train_step, x)
    assert not session_of(model).plain
    drop_gradients(model)
    measured = encore.measure(lambda: train_step(model, x)).step_peak
    assert measured <= encore.report(model).planned.step_peak <= 1.01 * measured
