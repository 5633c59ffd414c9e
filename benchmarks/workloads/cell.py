"""The LSTM written out in plain operations, one step at a time (Hochreiter and Schmidhuber 1997).

torch.compile breaks its graph at `torch.nn.LSTM`; here every gate of every step is a node of the one graph,
which is what makes the recurrent workloads worth planning. The caller writes the loop over time.
"""

from typing import TypeAlias

import torch
from torch import nn

State: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The hidden and the cell state of one layer, each `[batch, hidden]`."""


class LSTMCell(nn.Module):
    """One step of one layer: input, forget and output gates around a cell that is only ever added to."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(inputs, 4 * hidden)
        self.from_hidden = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: torch.Tensor, state: State) -> State:
        hidden, cell = state
        gates = self.from_input(x) + self.from_hidden(hidden)
        enter, forget, candidate, leave = gates.chunk(4, dim=-1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
        return torch.sigmoid(leave) * torch.tanh(cell), cell


class LSTMStack(nn.Module):
    """One step of several layers, each fed with the hidden state of the layer below."""

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.cells = nn.ModuleList(LSTMCell(inputs if i == 0 else hidden, hidden) for i in range(layers))

    def initial_states(self, sequences: torch.Tensor) -> list[State]:
        """All zeros, one row for each of the `sequences` about to be read."""
        zeros = sequences.new_zeros(sequences.shape[0], self.hidden)
        return [(zeros, zeros) for _ in self.cells]

    def forward(self, x: torch.Tensor, states: list[State]) -> list[State]:
        """The next state of every layer; the output of the step is the hidden state of the last one."""
        following = []
        for cell, state in zip(self.cells, states, strict=True):
            following.append(cell(x, state))
            x = following[-1][0]
        return following
