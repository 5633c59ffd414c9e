"""What random models have found, pinned."""

from __future__ import annotations

import torch
from torch import nn

import encore


def predicted_and_measured(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    encore.compile(model)

    def step() -> None:
        output = model(x)
        gradient = torch.ones_like(output)
        output.backward(gradient)  # both are held while it runs, as the prediction assumes

    for _ in range(2):
        model.zero_grad()
        x.grad = None
        measured = encore.measure(step).step_peak
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
    assert measured <= predicted <= 1.01 * measured


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
