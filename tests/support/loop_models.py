"""Loops to trace: bodies of a small network, each with something of its own in every step.

`REPEATED` can be traced by their distinct calls, `NOT_REPEATABLE` do more than compute new tensors, and `LAYERS` are
the pieces of random loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 4
WIDTH = 6


class Net(nn.Module):
    """Layers for a body to choose from; the body is called with the net and an input, and writes the loop."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.words = nn.Embedding(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def example(requires_grad: bool = True) -> Tensor:
    return torch.randn(4, WIDTH, requires_grad=requires_grad)


def a_tensor_twice_in_a_call(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x * x) + torch.where(x > 0, x, x)
    return x.sum()


def a_tensor_twice_inside_a_call(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = F.normalize(net.first(x)) + F.cosine_similarity(x, net.second(x)).unsqueeze(1) + x
    return x.mean()


def an_operand_as_it_came(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        same = x.contiguous()
        x = net.first(same) + F.dropout(same, 0.0) * same + x
    return x.sum()


def detached_and_frozen(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = torch.tanh(x @ net.frozen + net.first(x) + net.second(x).detach())
    return x.sum()


def whole_numbers(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        best, where = net.first(x).max(-1, keepdim=True)
        x = torch.tanh(best * x + where) + net.words(x.argmax(-1))
    return x.sum()


def parts(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        first, _, last = net.first(x).chunk(3, -1)
        columns = net.second(x).unbind(1)
        narrow, _ = net.first(x).split([2, 4], dim=1)
        x = torch.cat([first * last, torch.stack([columns[0], columns[2]], 1), narrow], 1)
    return x.sum()


def the_same_tensor_three_times(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = x + net.attention(x, x, x, need_weights=False)[0]  # PyTorch asks: is the key the query?
    return x.sum()


def losses(net: Net, x: Tensor) -> Tensor:
    loss = x.new_zeros(())
    for _ in range(STEPS):
        x = net.norm(net.first(x).softmax(-1) + x)
        loss = loss + F.cross_entropy(x, torch.arange(4)) + F.mse_loss(x, torch.zeros(4, WIDTH))
    return loss


def views_and_broadcasts(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        square = net.first(x).view(2, 2, WIDTH)
        mixed = torch.bmm(square @ square.transpose(1, 2) / 2.0, square).reshape(4, WIDTH)
        x = mixed.mean(0, keepdim=True).expand(4, WIDTH) + mixed[:, 1:2] * x.flip(1)
    return x.sum()


def other_numbers(net: Net, x: Tensor) -> Tensor:
    for step in range(STEPS):
        x = torch.tanh(net.first(x).bfloat16()).float() * (step + 1) + x.double().float() * -0.0 + x * 0.0
    return x.sum()


def convolutions(net: Net, x: Tensor) -> Tensor:
    x = x.view(1, WIDTH, 4)
    for _ in range(STEPS):
        x = F.gelu(net.conv(x))
    return x.sum()


def cells(net: Net, x: Tensor) -> Tensor:
    hidden = cell = x.new_zeros(4, WIDTH)
    for _ in range(STEPS):
        hidden, cell = net.cell(x, (hidden, cell))
    return hidden.sum() + cell.sum()


def draws(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = F.dropout(torch.tanh(net.first(x)).t(), 0.3).t() + torch.rand_like(x) + torch.randn(4, WIDTH)
    return x.sum()


def work_for_nothing(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)
        net.second(x).sum()
    return x.sum()


def several_outputs(net: Net, x: Tensor) -> Any:
    outputs = []
    for _ in range(STEPS):
        x = torch.tanh(net.first(x))
        outputs.append(x * 2)
    return *outputs, x, x.argmax(-1), x.detach() + 1, {"sum": x.sum()}


def an_output_that_is_a_transposed_view(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)
    return x.t()


def an_output_that_is_a_part(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = torch.tanh(net.first(x))
    return x[2:, 1:4]


def a_linear_layer_in_three_dimensions(net: Net, x: Tensor) -> Tensor:
    x = x.view(2, 2, WIDTH)
    for _ in range(STEPS):
        x = net.first(x)
    return x


REPEATED = [
    a_tensor_twice_in_a_call, a_tensor_twice_inside_a_call, an_operand_as_it_came, detached_and_frozen, whole_numbers,
    parts, the_same_tensor_three_times, losses, views_and_broadcasts, other_numbers, convolutions, cells, draws,
    work_for_nothing, several_outputs, an_output_that_is_a_transposed_view, an_output_that_is_a_part,
    a_linear_layer_in_three_dimensions,
]  # fmt: skip


def written_in_place(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)
        x += 1
        x = F.relu(net.first(x), inplace=True)
    return x.sum()


def written_by_index(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)
        x[0] = 0
    return x.sum()


def statistics_of_batches(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.batch_norm(net.first(x))
    return x.sum()


def gradients_off_for_a_while(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        with torch.no_grad():
            constant = net.second(x)
        x = net.first(x) + constant
    return x.sum()


def outputs_that_share_memory(net: Net, x: Tensor) -> Any:
    for _ in range(STEPS):
        x = torch.tanh(net.first(x))
    return x, x.t()


def complex_numbers(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = torch.fft.irfft(torch.fft.rfft(net.first(x)).conj(), n=WIDTH)
    return x.sum()


def counted_from_the_beginning(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = torch.as_strided(net.first(x), (4, WIDTH), (WIDTH, 1))
    return x.sum()


def tensors_of_their_own(net: Net, x: Tensor) -> Tensor:
    for _ in range(STEPS):
        x = net.first(x)[:, [0, 2, 1, 3, 5, 4]]
    return x.sum()


NOT_REPEATABLE = [
    written_in_place, written_by_index, statistics_of_batches, gradients_off_for_a_while, outputs_that_share_memory,
    complex_numbers, counted_from_the_beginning, tensors_of_their_own,
]  # fmt: skip


Layer = Callable[[Net, Tensor, Tensor], Tensor]
"""Takes the state of the loop and what came in at first, both `[4, WIDTH]`, and gives the next state."""

LAYERS: dict[str, Layer] = {
    "linear": lambda net, x, first: net.first(x),
    "tanh": lambda net, x, first: torch.tanh(x),
    "square": lambda net, x, first: x * x,
    "add": lambda net, x, first: x + first,
    "subtract": lambda net, x, first: first.sub(x, alpha=2),
    "gate": lambda net, x, first: torch.sigmoid(net.second(first)) * x,
    "norm": lambda net, x, first: net.norm(x),
    "softmax": lambda net, x, first: x.softmax(0),
    "transpose": lambda net, x, first: x.t().reshape(4, WIDTH),
    "turn": lambda net, x, first: x.t().contiguous().t(),
    "same": lambda net, x, first: x.contiguous(),
    "halves": lambda net, x, first: torch.cat(x.chunk(2, 1)[::-1], 1),
    "columns": lambda net, x, first: torch.stack([x.unbind(1)[column] for column in (0, 1, 1, 4, 2, 0)], 1),
    "mean": lambda net, x, first: x.mean(0, keepdim=True).expand(4, WIDTH),
    "clamp": lambda net, x, first: x.clamp(-0.5, 0.5),
    "masked": lambda net, x, first: x.masked_fill(first > 0, 0.0),
    "detached": lambda net, x, first: x.detach() + x,
    "normalize": lambda net, x, first: F.normalize(x),
    "dropout": lambda net, x, first: F.dropout(x, 0.3),
    "words": lambda net, x, first: net.words(x.argmax(-1)) + x,
    "rows": lambda net, x, first: x[1:2] * x + x[:, 2:3],
    "narrow": lambda net, x, first: F.pad(x[:, 1:], (0, 1)),
}
