"""The size of oneDNN's LSTM workspace, which its fake kernel does not know, against the real operator."""

from __future__ import annotations

import pytest
import torch

from encore.graph.sizes import LSTM_MODE, onednn_lstm_workspace


@pytest.mark.parametrize("hidden", [1, 16, 33, 64, 128, 256])
@pytest.mark.parametrize(
    ("steps", "batch", "features"), [(1, 1, 1), (7, 3, 20), (24, 4, 64), (5, 8, 256), (30, 2, 300)]
)
def test_the_workspace_is_what_the_real_operator_returns(steps: int, batch: int, features: int, hidden: int) -> None:
    state = torch.zeros(1, batch, hidden)
    weights = (torch.zeros(4 * hidden, features), torch.zeros(4 * hidden, hidden), *[torch.zeros(4 * hidden)] * 2)
    with torch.enable_grad():
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
            torch.zeros(steps, batch, features), *weights, state, state,
            False, [], LSTM_MODE, hidden, 1, True, False, False, True,
        )  # fmt: skip
    assert workspace.numel() * workspace.element_size() == onednn_lstm_workspace(steps, batch, features, hidden)
