"""Steps that cannot be run again, options that mean nothing, budgets that are too small: told, never wrong numbers."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encore.bptt import ScanReport, scan
from encore.bptt.reach import reachable
from encore.errors import BudgetError, OptionError, ReplayError
from support.scan_reference import BATCH, WAYS, WIDTH, Lazy, lstm
from support.watchdog import watchdog

REACHED: list[Tensor] = []


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watchdog(300):
        yield


def refused(step: Callable[..., Any], error: type[Exception], message: str, **options: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    chosen = {"slots": 2, **options}
    with pytest.raises(error, match=message):
        scan(lambda h, x: step(h, x, weight), torch.zeros(3), torch.ones(9, 3), **chosen)[0].sum().backward()


def test_steps_that_are_refused() -> None:
    count = itertools.count()
    outside = nn.Parameter(torch.ones(3)) * 2
    refused(lambda h, x, w: h * w, OptionError, r"must return a tuple \(carry, y\)|unpack|changes its structure")
    refused(lambda h, x, w: (h.add_(1) * w, None), (OptionError, RuntimeError), "carry|leaf Variable")  # type: ignore[arg-type]
    refused(lambda h, x, w: (h * w + x.add_(1), None), OptionError, "writes into its input")
    refused(lambda h, x, w: ((h * w, h) if next(count) > 5 else h * w + x, None), OptionError, "changes its structure")
    refused(lambda h, x, w: (h * w + next(count), None), ReplayError, "another state than before")
    refused(lambda h, x, w: (h * outside * w + x, None), OptionError, "consts=")
    refused(lambda h, x, w: (h * w + x, None), OptionError, "'disk', 'host'", tiers="tape")


@pytest.mark.parametrize("way", ["one slot", "revolve", "blocks", "disk", "disk, blocks"])
def test_a_counter_that_reaches_only_y_is_noticed(way: str) -> None:
    """States agree whatever y is: without a look at y its gradients would be those of other numbers."""
    weight = nn.Parameter(torch.ones(WIDTH))
    count = itertools.count()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * weight + x)
        return h, h * float(next(count))

    _, ys = scan(step, torch.zeros(BATCH, WIDTH), torch.ones(800, BATCH, WIDTH), **WAYS[way])
    with pytest.raises(ReplayError, match="gave another y than before"):
        ys.sum().backward()


class _Now:
    """A branch that is taken at every tenth step."""

    def __init__(self, seldom: Callable[[Tensor], Tensor]) -> None:
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seldom = seldom

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        h = torch.tanh(h * self.weight + x)
        return (self.seldom(h) if int(x[0, 0]) % 10 == 9 else h), None

    def train(self, **options: Any) -> None:
        xs = torch.arange(40.0).view(40, 1, 1).expand(40, 4, WIDTH)
        carry, _ = scan(self.step, torch.zeros(4, WIDTH), xs, **options)
        carry.sum().backward()


def test_buffers_first_written_by_a_later_step_are_noticed() -> None:
    norm = nn.BatchNorm1d(WIDTH, affine=False)
    mean, variance = torch.zeros(WIDTH), torch.ones(WIDTH)
    untold = functools.partial(F.batch_norm, running_mean=mean, running_var=variance, training=True)
    counted = torch.zeros(2, 2)
    branches: list[Callable[[Tensor], Tensor]] = [norm, untold, lambda h: (counted.add_(1), h)[1]]
    for seldom in branches:
        for options in (WAYS["revolve"], WAYS["disk"]):
            with pytest.raises(ReplayError, match=r"a later step wrote into a tensor of shape \((7,)?(2, 2)?\)"):
                _Now(seldom).train(**options)
        _Now(seldom).train()  # every step keeps its tape, and none is run again
    norm.eval()
    _Now(norm).train(slots=2)


def test_what_a_step_can_reach() -> None:
    tensors = [torch.full((), float(number)) for number in range(6)]
    module = nn.Module()
    module.register_buffer("held", tensors[0])

    class Slotted:
        __slots__ = ("inside",)

        def __init__(self) -> None:
            self.inside = {"deep": [(tensors[1],)]}

    slotted, partial = Slotted(), functools.partial(lambda one, other: one, tensors[2])

    def step(h: Tensor, x: Tensor, default: Tensor = tensors[3], *, named: Tensor = tensors[4]) -> tuple[Any, Any]:
        return [(module, slotted, partial, REACHED) for _ in range(1)], None

    REACHED.append(tensors[5])
    try:
        assert {id(tensor) for tensor in reachable(step)} == {id(tensor) for tensor in tensors}
    finally:
        REACHED.clear()


def test_parameters_that_come_late_and_shapes_that_change_are_refused() -> None:
    late = nn.Parameter(torch.ones(3))
    start = torch.zeros(3, requires_grad=True)
    carry, _ = scan(lambda h, x: (h * late if x > 2 else h + 1, None), start, torch.arange(5.0), slots=2)
    with pytest.raises(OptionError, match="first step did not use"):
        carry.sum().backward()
    for xs in (torch.arange(1.0, 4.0), iter(torch.arange(1.0, 4.0))):
        with pytest.raises(OptionError, match="changes its shape"):
            scan(lambda h, x: (h, torch.zeros(int(x)) * h[0]), start, xs, slots=1)
    for xs in (torch.arange(5.0), iter(torch.arange(5.0))):
        with pytest.raises(OptionError, match=r"changes its type from torch\.float32 to torch\.float64"):
            scan(lambda h, x: (h, h.double() if x > 2 else h + 1), start, xs, slots=1)


def test_a_parameter_after_a_first_step_without_any_is_refused() -> None:
    linear = nn.Linear(3, 3)
    xs = torch.ones(6, 3)
    xs[0] = 0

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = linear(h + x) if x.any() else h
        return h, h

    for given in (xs, iter(xs)):
        with pytest.raises(OptionError, match="step 1 uses a parameter, and the first step used none"):
            scan(step, torch.zeros(3), given, slots=2)
    with torch.no_grad():
        assert not scan(step, torch.zeros(3), xs, slots=2)[1].requires_grad


@pytest.mark.parametrize("way", ["one slot", "revolve", "blocks", "disk", "disk, blocks"])
def test_the_first_replay_of_an_unknown_length_is_held_against_the_last_state(way: str) -> None:
    """Every replay agrees with the next one: only what forward returned tells that all of them are others."""
    weight, scale = nn.Parameter(torch.ones(WIDTH)), [1.0]
    xs = iter(torch.randn(20, BATCH, WIDTH))
    carry, _ = scan(lambda h, x: (torch.tanh(h * weight + x) * scale[0], None), torch.zeros(BATCH, WIDTH), xs,
                    **WAYS[way])  # fmt: skip
    scale[0] = 2.0
    with pytest.raises(ReplayError, match="another state than before"):
        carry.sum().backward()


def test_an_error_in_the_step_comes_out_as_it_is() -> None:
    count = itertools.count()

    weight = nn.Parameter(torch.ones(3))

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        if next(count) == calls:
            raise KeyError("mine")
        return h * weight + x, None

    def train() -> None:
        carry, _ = scan(step, torch.zeros(3), torch.ones(20, 3), slots=3, tiers="disk", schedule="multistage")
        carry.sum().backward()

    for calls in (0, 1, 6, 25):  # noqa: B007
        count = itertools.count()
        with pytest.raises(KeyError, match="mine"):
            train()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encore-disk")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "1MiB", "slots": 2}, "exclude each other"),
        ({"slots": 0}, "slots=0"),
        ({"slots": 2, "truncate": True}, "truncate=True"),
        ({"budget": "50%"}, "not known"),
        ({"tiers": "disk"}, "budget= or slots="),
        ({"schedule": "revolve"}, "needs to know how much memory"),
        ({"slots": 2, "schedule": "best"}, "'auto', 'keep'"),
        ({"slots": 2, "schedule": "multistage"}, "tiers="),
        ({"slots": 2, "xs": 3}, "xs is a int"),
        ({"slots": 2, "xs": None}, "length="),
        ({"slots": 2, "xs": Lazy(torch.ones(4, 3)), "length": 5}, "length=5, and xs has 4 steps"),
        ({"slots": 2, "xs": (torch.ones(3), torch.ones(4))}, "first dimension"),
        ({"slots": 2, "carry": (torch.ones(3), 1.0)}, "make it a tensor"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    given = {"carry": torch.zeros(3), "xs": torch.ones(4, 3), **options}
    with pytest.raises(OptionError, match=message):
        scan(lambda h, x: (h * weight + x, None), given.pop("carry"), given.pop("xs"), **given)


def test_a_budget_that_is_too_small_says_what_is_enough() -> None:
    loop = lstm(50)
    with pytest.raises(BudgetError, match="needs at least") as caught:
        scan(loop.step, loop.carry, loop.xs, budget=100)
    report = ScanReport()
    scan(loop.step, loop.carry, loop.xs, budget=caught.value.floor, report=report)
    assert report.predicted_bytes <= caught.value.floor
    least = ScanReport()
    scan(loop.step, loop.carry, loop.xs, budget="min", report=least)
    assert least.predicted_bytes == caught.value.floor
