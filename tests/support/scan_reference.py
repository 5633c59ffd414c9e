"""Loops over time to compare scans with: their steps, the loop written out, and all results of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from encore.bptt import scan

BATCH, WIDTH = 3, 7


@dataclass
class Loop:
    """A step with what goes into it."""

    step: Callable[..., tuple[Any, Any]]
    carry: Any
    xs: Any
    watched: Sequence[Tensor] = field(default_factory=list)
    """Whose gradients are compared."""
    buffers: list[Tensor] = field(default_factory=list)
    consts: Any = None

    def outside(self) -> Any:
        return None if self.consts is None else self.consts()


def written_out(loop: Loop, consts: Any, *, truncate: int | None = None) -> tuple[Any, Any]:
    """The loop without Encore."""
    carry, ys = loop.carry, []
    leaves, spec = pytree.tree_flatten(loop.xs)
    for number, row in enumerate(zip(*(leaf.unbind(0) for leaf in leaves), strict=True)):
        if truncate is not None and number and number % truncate == 0:
            carry = pytree.tree_map(lambda tensor: tensor.detach(), carry)
        x = pytree.tree_unflatten(list(row), spec)
        carry, y = loop.step(carry, x) if consts is None else loop.step(carry, x, consts)
        ys.append(y)
    if ys[0] is None:
        return carry, None
    columns = zip(*(pytree.tree_leaves(y) for y in ys), strict=True)
    return carry, pytree.tree_unflatten([torch.stack(column) for column in columns], pytree.tree_structure(ys[0]))


def outcome(loop: Loop, run: Callable[[Loop, Any], tuple[Any, Any]]) -> list[Tensor]:
    """Everything that a training step leaves behind."""
    torch.manual_seed(7)
    before = [buffer.clone() for buffer in loop.buffers]
    for tensor in loop.watched:
        tensor.grad = None
    carry, ys = run(loop, loop.outside())
    ends = [end for end in pytree.tree_leaves((carry, ys)) if isinstance(end, Tensor)]
    moving = [end for end in ends if end.requires_grad]
    sum((end.float() * torch.linspace(-1, 2, end.numel()).view(end.shape)).pow(2).sum() for end in moving).backward()  # type: ignore[union-attr]
    found = [end.detach().clone() for end in ends]
    found += [torch.zeros(()) if tensor.grad is None else tensor.grad for tensor in loop.watched]
    found += [buffer.clone() for buffer in loop.buffers]
    for buffer, old in zip(loop.buffers, before, strict=True):
        buffer.copy_(old)
    return [*found, torch.get_rng_state()]


def scanning(**options: Any) -> Callable[[Loop, Any], tuple[Any, Any]]:
    return lambda loop, consts: scan(loop.step, loop.carry, loop.xs, consts=consts, **options)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


# -- steps -------------------------------------------------------------------------------------------------------------


def lstm(steps: int) -> Loop:
    cell = nn.LSTMCell(5, WIDTH)
    xs = torch.randn(steps, BATCH, 5, requires_grad=True)
    carry = torch.randn(BATCH, WIDTH, requires_grad=True), torch.zeros(BATCH, WIDTH)
    return Loop(lambda state, x: (cell(x, state), None), carry, xs, [*cell.parameters(), xs, carry[0]])


def gru_with_dropout(steps: int) -> Loop:
    """Random, with y the carry itself, which is used several times in the next step."""
    cell = nn.GRUCell(5, WIDTH)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(cell(x, h), 0.3)
        return h, h

    xs = torch.randn(steps, BATCH, 5)
    carry = torch.zeros(BATCH, WIDTH)
    return Loop(step, carry, xs, [*cell.parameters()])


def own_generator(steps: int) -> Loop:
    """Draws from a generator of its own."""
    cell = nn.GRUCell(5, WIDTH)
    generator = torch.Generator()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x + torch.rand(BATCH, 5, generator=generator), h)
        return h, h * torch.empty(WIDTH).bernoulli_(0.5, generator=generator)

    def begin() -> None:
        generator.manual_seed(3)

    xs = torch.randn(steps, BATCH, 5)
    return Loop(step, torch.zeros(BATCH, WIDTH), xs, [*cell.parameters()], consts=begin)


def by_hand(steps: int) -> Loop:
    """A weight used three times a step, a carry that is one tensor twice, a y that is the carry, and another."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def step(carry: dict[str, Tensor], x: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        a, b = carry["a"], carry["b"]
        h = torch.tanh(a @ weight + b @ weight.t() + x["x"] + a * b)
        return {"a": h, "b": h, "count": carry["count"] + 1}, (h, (h @ weight).mean())

    xs = {"x": torch.randn(steps, BATCH, WIDTH, requires_grad=True)}
    start = torch.randn(BATCH, WIDTH, requires_grad=True)
    carry = {"a": start, "b": start, "count": torch.zeros((), dtype=torch.long)}
    return Loop(step, carry, xs, [weight, xs["x"], start])


def batch_norm(steps: int) -> Loop:
    """Statistics that are written in place, and used, and a counter."""
    norm = nn.BatchNorm1d(WIDTH)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    buffers = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    linear = nn.Linear(WIDTH, WIDTH)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = norm(linear(h) + x) * (1 + buffers[0].clone())
        return h, h.sum(-1)

    xs = torch.randn(steps, 8, WIDTH)
    watched = [*norm.parameters(), *linear.parameters()]
    return Loop(step, torch.zeros(8, WIDTH), xs, watched, buffers)


def views(steps: int) -> Loop:
    """A carry that is part of something larger, and transposed."""
    linear = nn.Linear(WIDTH, 2 * WIDTH)

    def step(carry: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        left, right = linear(carry[0] + carry[1].t() + x).tanh().chunk(2, -1)
        return [left, right.contiguous().t()], left.sum(-1)

    xs = torch.randn(steps, BATCH, WIDTH)
    return Loop(step, [torch.zeros(BATCH, WIDTH), torch.zeros(WIDTH, BATCH)], xs, [*linear.parameters()])


def words(steps: int) -> Loop:
    """Integers in, nothing but a carry out, parameters in an embedding."""
    embedding = nn.Embedding(11, WIDTH)
    cell = nn.RNNCell(WIDTH, WIDTH)
    xs = torch.randint(0, 11, (steps, BATCH))
    watched = [*embedding.parameters(), *cell.parameters()]
    return Loop(lambda h, x: (cell(embedding(x), h), None), torch.zeros(BATCH, WIDTH), xs, watched)


def attention(steps: int) -> Loop:
    """Uses something that was computed outside, with gradients."""
    encoder = nn.Linear(4, WIDTH)
    memory = torch.randn(BATCH, 6, 4)
    cell = nn.GRUCell(WIDTH, WIDTH)

    def step(h: Tensor, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        weights = (memory @ h.unsqueeze(-1)).softmax(1)
        h = cell(x + (weights * memory).sum(1), h)
        return h, weights.squeeze(-1)

    xs = torch.randn(steps, BATCH, WIDTH)
    watched = [*encoder.parameters(), *cell.parameters()]
    return Loop(step, torch.randn(BATCH, WIDTH), xs, watched, consts=lambda: encoder(memory))


def leaves_as_results(steps: int) -> Loop:
    """A parameter is a y of its own, and now and then the new state."""
    weight, spread = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
    fresh = nn.Parameter(torch.randn(BATCH, WIDTH))

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        h = torch.tanh(h * weight + x)
        h = fresh if x[0, 0] > 1 else h + 0 * fresh
        return h, (h, spread)

    xs = torch.randn(steps, BATCH, WIDTH)
    xs[0], xs[steps // 2] = 0.5, 1.5
    return Loop(step, torch.zeros(BATCH, WIDTH), xs, [weight, spread, fresh])


def state_and_its_copy(steps: int) -> Loop:
    """Two tensors with one memory, of which only one takes part in gradients."""
    weight, other = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def step(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Any, None]:
        target, h = state
        h = torch.tanh(weight * h + other * target + x)
        return (h.detach(), h), None

    start = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    return Loop(step, start, torch.randn(steps, BATCH, WIDTH), [weight, other])


def flag(steps: int) -> Loop:
    """A buffer that is back at its first value after every second step."""
    weight, raised = nn.Parameter(torch.randn(WIDTH)), torch.zeros(())

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        h = torch.tanh(h * weight + x * raised)
        raised.copy_(1 - raised)
        return h, None

    return Loop(step, torch.zeros(BATCH, WIDTH), torch.randn(steps, BATCH, WIDTH), [weight], [raised])


LOOPS = [
    lstm, gru_with_dropout, own_generator, by_hand, batch_norm, views, words, attention, state_and_its_copy, flag,
]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "keep": {},
    "one slot": {"slots": 1},
    "revolve": {"slots": 4},
    "blocks": {"budget": 30_000, "schedule": "revolve"},
    "disk": {"slots": 2, "tiers": "disk", "schedule": "multistage"},
    "disk, blocks": {"budget": 90_000, "tiers": "disk", "schedule": "multistage"},
    "host": {"slots": 2, "tiers": ("host", "disk"), "schedule": "multistage"},
}


class Lazy:
    """Inputs that are made when they are asked for."""

    def __init__(self, xs: Tensor) -> None:
        self.xs = xs
        self.asked = 0

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, step: int) -> Tensor:
        self.asked += 1
        return self.xs[step]
