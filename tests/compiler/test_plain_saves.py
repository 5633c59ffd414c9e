"""What plain code saves inside a model, in codes: the same gradients, fewer bytes, and autograd's rules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import encore
from encore.api import compiled_call
from encore.compiler.plain_saves import CODES, OFFLOADED, PackedActivation, PlainSaves
from encore.lower import Transport
from encore.tiers import Disk
from support.cut_models import Block

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Memory block of unknown size.*:UserWarning"),
]


@pytest.fixture
def saves() -> PlainSaves:
    found = PlainSaves(dict)
    found.level = CODES
    return found


class Gate(torch.autograd.Function):
    """Saves a mask in bytes, and integers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask, place = x > 0, (x * 10).long()
        ctx.save_for_backward(mask, place)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        mask, place = ctx.saved_tensors
        return gradient * mask + 0 * place


@torch.compiler.disable
def gated(x: torch.Tensor) -> torch.Tensor:
    return Gate.apply(x)


class Gated(nn.Module):
    """Blocks with plain code between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = gated(block(x))
        return x.square().mean()


def codes_in(packed: list[Any]) -> int:
    return sum(isinstance(one, PackedActivation) and one.held is not None for one in packed)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(64, 100) > 0.5, lambda: torch.randint(200, (64, 100)), lambda: torch.rand(64, 100).relu(),
        lambda: (torch.rand(64, 100) - 0.7).relu().t(), lambda: (torch.rand(1, 100) - 0.9).relu().expand(64, 100),
        lambda: (torch.rand(64, 200) - 0.9).relu()[:, ::2], lambda: torch.full((64, 100), -0.0),
    ],
)  # fmt: skip
def test_what_is_packed_comes_back_bit_for_bit(saves: PlainSaves, make: Any) -> None:
    x = make()
    packed = saves.pack(x)
    again = saves.unpack(packed)
    assert (again.shape, again.dtype) == (x.shape, x.dtype)
    assert torch.equal(again, x)
    if x.is_floating_point():
        assert torch.equal(again.signbit(), x.signbit())


def test_a_tensor_that_is_saved_twice_has_one_code_until_it_changes(saves: PlainSaves) -> None:
    x = (torch.rand(64, 100) - 0.8).relu()
    first, second = saves.pack(x), saves.pack(x.view(64, 100))
    assert first.held is second.held is not None
    x.data.add_(1)  # without a new version
    x.data[x.data == 1] = 0
    third = saves.pack(x)
    assert third.held is not first.held
    assert torch.equal(saves.unpack(third), x)


def test_writing_to_a_saved_tensor_is_an_error_as_in_eager(saves: PlainSaves) -> None:
    for scale in (1.0, 0.0):  # kept as it is, and in a code
        x = torch.rand(64, 100, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(saves.pack, saves.unpack):
            y = x * scale
            z = y.square()
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_parameters_and_inputs_are_never_encoded(saves: PlainSaves) -> None:
    weight, given = nn.Parameter(torch.zeros(64, 100)), torch.zeros(64, 100)
    packed: list[Any] = []
    pack = saves.pack
    saves.pack = lambda tensor: packed.append(pack(tensor)) or packed[-1]  # type: ignore[method-assign, func-returns-value]
    with saves.hooks((given,), {}):
        (given @ weight.t()).square().sum().backward()
    assert codes_in(packed) == 1  # the product, which is zero
    assert torch.equal(weight.grad if weight.grad is not None else weight + 1, torch.zeros(64, 100))


def test_hooks_of_the_users_own_and_checkpoints_stay_in_charge(saves: PlainSaves) -> None:
    x = torch.rand(64, 100, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x - 0.9).relu().exp().square()

    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    with torch.autograd.graph.save_on_cpu(), saves.hooks((x,), {}):
        assert saves._resident == set()  # not used around hooks that were there
    seen = []
    with saves.hooks((x,), {}):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t.detach(), lambda t: t):  # type: ignore[func-returns-value]
            inner = layer(x)
        outer = checkpoint(layer, x, use_reentrant=False)
    assert seen
    for made in (inner, outer):
        (found,) = torch.autograd.grad(made.sum(), x, retain_graph=True)
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(made.sum(), x)[0], expected)


def test_activations_without_a_code_go_to_a_tier(saves: PlainSaves) -> None:
    with Disk() as disk:
        transport = Transport(disk)
        saves.transports = lambda: {"disk": transport}
        assert saves.save_less()
        assert saves.level == OFFLOADED
        assert not saves.save_less()
        x = torch.rand(64, 100, requires_grad=True)
        with saves.hooks((), {}):
            y = (x + 1).exp().square()
        assert transport.parcels == 1
        (found,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad((x + 1).exp().square().sum(), x)
        assert torch.equal(found, expected)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
def test_a_step_whose_plain_code_exceeds_the_budget_is_encoded() -> None:
    plain, x = Gated(), torch.randn(16, 64, 32)

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward()

    lean = encore.compile(copy.deepcopy(plain), budget="min", lowering="eager")
    for _ in range(6):
        step(lean)
    lean.zero_grad(set_to_none=True)
    lowest = encore.measure(lambda: step(lean)).step_peak + encore.report(lean).resident
    budget = int(0.85 * lowest)
    model = encore.compile(copy.deepcopy(plain), budget=budget, lowering="eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(7):
            step(model)
    assert not [one for one in warned if "more than its budget" in str(one.message)]
    session = compiled_call(model).session
    assert session.plain_saves.level == CODES
    assert 0 < session.plain_saves.kept_bytes < session.plain_saves.saved_bytes / 4
    assert len(session.graphs) == 2  # the hooks themselves are not compiled
    model.zero_grad(set_to_none=True)
    assert encore.measure(lambda: step(model)).step_peak + encore.report(model).resident <= budget
    step(plain)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)
