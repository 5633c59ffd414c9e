"""The lines of Python that allocate, in forward and in backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from encore.cost.lines import Place, PlacedEvent, is_users, own_events
from encore.cost.observation import AliveBlock, Observation

HERE = Path(__file__).name
SIZE = 64 * 100 * 4


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return torch.mul(gradient, y)


def in_two_lines(x: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(1)
    twice = x * 2
    torch.zeros(1)
    return twice + zeros


def line_of(function: Any, text: str) -> int:
    source = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(number for number in range(first, len(source)) if text in source[number - 1])


def observed(run: Any) -> list[AliveBlock]:
    observation = Observation.start(lines=True)
    assert observation is not None
    kept = run()
    segments = observation.stop()
    assert segments is not None
    del kept
    blocks = observation.alive_at_peak(0)
    assert sum(block.bytes for block in blocks) == segments[0].peak
    return [block for block in blocks if block.bytes >= SIZE]


def test_forward_and_backward_of_a_line_are_its_own() -> None:
    x, wanted = torch.randn(64, 100, requires_grad=True), torch.randint(100, (64,))

    def step() -> None:
        y = Doubled.apply(x)
        loss = F.cross_entropy(y, wanted)
        loss.backward()

    found = {(block.place.line, block.place.function, block.place.operator) for block in observed(step)}
    inside, loss = line_of(Doubled.forward, "x.exp()"), line_of(step, "cross_entropy")
    assert (f"{HERE}:{inside}", "forward", "exp") in found
    assert (f"{HERE}:{loss}", "step", "cross_entropy_loss") in found
    assert (f"{HERE}:{loss}", "step", "LogSoftmaxBackward0") in found


def test_an_operator_between_calls_is_known_by_them() -> None:
    x = torch.randn(64, 100)
    places = {block.place.operator: block.place.line for block in observed(lambda: in_two_lines(x))}
    first = line_of(in_two_lines, "zeros = ")
    assert places["mul"] == f"{HERE}:{first}-{first + 2}"
    assert places["add"].startswith(f"{HERE}:")


@pytest.mark.parametrize("known", [True, False])
def test_old_gradients_count_until_they_are_freed(*, known: bool) -> None:
    parameter = torch.randn(1000, 1000, requires_grad=True)
    if known:  # PyTorch remembers what was allocated under a profiler
        observation = Observation.start()
        parameter.sum().backward()
        assert observation is not None
        observation.stop()
    else:
        parameter.sum().backward()
    assert parameter.grad is not None
    observation = Observation.start(watched=[parameter.grad])
    assert observation is not None
    observation.mark()
    parameter.grad = None
    observation.mark()
    parameter.sum().backward()
    segments = observation.stop()
    assert segments is not None
    size = parameter.untyped_storage().nbytes()
    assert [round(segment.end / size, 2) for segment in segments] == [1, 0, 1]
    assert max(segment.peak for segment in segments) < 1.01 * size


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("train.py", True), ("models/net.py", True), ("/home/me/train.py", True), ("transformers/trainer.py", True),
        ("torch/nn/functional.py", False), ("/v/site-packages/torch/a.py", False), ("<eval_with_key>.3", False),
        ("contextlib.py", False), ("", False),
    ],
)  # fmt: skip
def test_libraries_are_not_the_users_code(file: str, *, users: bool) -> None:
    assert is_users(file) is users


def test_releases_of_what_was_there_before_are_not_taken_for_the_steps() -> None:
    size = 3_000_017  # no other block of this size is around
    observation = Observation.start()
    under_a_profiler = torch.empty(size, dtype=torch.uint8)
    assert observation is not None
    observation.stop()
    observation = Observation.start()
    assert observation is not None
    del under_a_profiler
    kept = torch.empty(size // 2, dtype=torch.uint8)
    segments = observation.stop()
    assert segments is not None
    assert segments[0].end == kept.nbytes


def test_memory_that_is_used_again_was_freed_by_a_thread_that_is_not_observed() -> None:
    seen = [(100, 0x1000), (50, 0x2000), (80, 0x1010), (-50, 0x2000), (30, 0x1060)]
    events = [PlacedEvent(time, size, address, Place()) for time, (size, address) in enumerate(seen)]
    own = [(event.bytes, event.address) for event in own_events(events)]
    assert own == [(100, 0x1000), (50, 0x2000), (-100, 0x1000), (80, 0x1010), (-50, 0x2000), (30, 0x1060)]
