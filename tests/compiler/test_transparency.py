"""Encore is transparent: modules, buffers, hooks, containers, modes, views and writes behave as they do in eager."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_matches_eager, assert_same, run_step, session_of

pytestmark = pytest.mark.mostly_eager


class Net(nn.Module):
    """Batch norm, dropout, a buffer that is written, tied weights, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[assignment, operator]
        hidden = F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)  # type: ignore[operator]
        return self.second(hidden)


def data(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 6)), requires_grad=True)


def weights() -> nn.Module:
    return nn.Linear(6, 6)


# -- modules ---------------------------------------------------------------------------------------------------------


def test_buffers_are_written_once_a_step(lowering: str) -> None:
    model = assert_matches_eager(Net(), data(), steps=3, lowering=lowering)
    assert (int(model.norm.num_batches_tracked), int(model.calls)) == (3, 3)


def test_train_and_eval_alternate(lowering: str) -> None:
    eager = Net()
    model = encore.compile(copy.deepcopy(eager), lowering=lowering)
    for training in (True, False, True, False):
        x = data()
        assert_same(run_step(model.train(training), (x,)), run_step(eager.train(training), (x,)), lowering)
    assert len(session_of(model).graphs) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_runs_plain(mode: Callable[[], Any], lowering: str) -> None:
    model, x = encore.compile(Net().eval(), lowering=lowering), torch.randn(2, 6)
    with mode():
        output = model(x)
    assert not output.requires_grad
    assert session_of(model).graphs == []
    with pytest.raises(encore.NeverRunError):
        encore.report(model)
    assert_same({"output": model(x).detach()}, {"output": output.clone()}, lowering)


def test_a_state_dict_goes_round(lowering: str) -> None:
    model, eager, x = encore.compile(Net(), lowering=lowering), Net(), data()
    run_step(model, (x,))
    assert list(model.state_dict()) == list(eager.state_dict())
    eager.load_state_dict(model.state_dict())
    assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)
    fresh = Net()
    model.load_state_dict(fresh.state_dict())
    assert_same(run_step(model, (x,)), run_step(fresh, (x,)), lowering)


@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_a_deep_copy_is_a_model_of_its_own(when: str, lowering: str) -> None:
    model, eager, x = encore.compile(Net(), lowering=lowering), Net(), data()
    eager.load_state_dict(model.state_dict())
    if when == "after it":
        assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = copy.deepcopy(model)
    twin.zero_grad()
    model.zero_grad()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    changed = Net()
    changed.load_state_dict(twin.state_dict())
    assert_same(run_step(twin, (x,)), run_step(changed, (x,)), lowering)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
def test_twenty_optimizer_steps(kind: Callable[..., torch.optim.Optimizer], lowering: str) -> None:
    torch.manual_seed(0)
    eager = Net()
    model = encore.compile(copy.deepcopy(eager), lowering=lowering)
    batches = [torch.randn(5, 6) for _ in range(20)]
    losses: dict[nn.Module, list[Tensor]] = {model: [], eager: []}
    for each in (model, eager):
        torch.manual_seed(1)
        optimizer = kind(each.parameters(), lr=0.05)
        for batch in batches:
            optimizer.zero_grad()
            loss = each(batch).square().mean()
            loss.backward()
            losses[each].append(loss.detach())
            optimizer.step()
    assert_same({"losses": torch.stack(losses[model])}, {"losses": torch.stack(losses[eager])}, lowering)
    if lowering == "eager" or kind is torch.optim.SGD:
        # The gradient of a bias in front of batch norm is rounding and nothing else: Adam makes full steps of it.
        assert_same(dict(model.state_dict()), dict(eager.state_dict()), lowering)
    assert session_of(model).forwards_run == 20


@pytest.mark.parametrize("inner", [False, True], ids=["on the model", "on a layer"])
@pytest.mark.parametrize("early", [False, True], ids=["set after compile", "set before"])
def test_hooks_run_as_often_and_change_as_much_as_in_eager(inner: bool, early: bool, lowering: str) -> None:
    seen: dict[str, list[str]] = {}
    found = []
    for name in ("planned", "eager"):
        torch.manual_seed(0)
        model, calls = Net(), seen.setdefault(name, [])
        if name == "planned" and not early:
            encore.compile(model, lowering=lowering)
        where = model.first if inner else model
        where.register_forward_pre_hook(lambda _, args, calls=calls: (calls.append("pre"), (args[0] * 2,))[1])
        where.register_forward_hook(lambda _, args, output, calls=calls: (calls.append("forward"), output + 1)[1])
        where.register_full_backward_hook(lambda _, inputs, outputs, calls=calls: calls.append("backward"))  # type: ignore[misc]
        model.norm.weight.register_hook(lambda gradient, calls=calls: (calls.append("parameter"), gradient * 3)[1])
        if name == "planned" and early:
            encore.compile(model, lowering=lowering)
        x = torch.randn(5, 6, requires_grad=True)
        found.append([run_step(model, (x,)) for _ in range(2)])
    for have, want in zip(*found, strict=True):
        assert_same(have, want, lowering)
    assert sorted(seen["planned"]) == sorted(seen["eager"])
    assert seen["eager"].count("parameter") == 2


# -- arguments and results -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Record:
    left: Tensor
    right: Tensor
    name: str = "record"


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda a, b: {"left": a, "right": b},
    "ordered dict": lambda a, b: OrderedDict(left=a, right=b),
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, [b]],
    "namedtuple": Pair,
    "dataclass": Record,
    "nest": lambda a, b: {"pair": (a, {"deep": [b]}), "number": 3, "nothing": None, "text": "x"},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_go_in_and_come_out(container: str, lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = weights()

        def forward(self, given: Any, scale: float, *, flip: bool = False, name: str | None = None) -> Any:
            held = run_through(given)
            left, right = self.layer(held[0]) * scale, held[1].exp()
            return CONTAINERS[container](right, left) if flip else CONTAINERS[container](left, right)

    def run_through(given: Any) -> tuple[Tensor, Tensor]:
        if container in ("namedtuple", "dataclass"):
            return given.left, given.right
        if container == "nest":
            return given["pair"][0], given["pair"][1]["deep"][0]
        if container == "list":
            return given[0], given[1][0]
        return tuple(given.values()) if isinstance(given, dict) else given

    given = CONTAINERS[container](data(), data())
    model = assert_matches_eager(Model(), given, 0.5, flip=True, name="x", lowering=lowering)
    assert type(model(given, 0.5)) is type(given)


def test_an_output_that_the_loss_does_not_use(lowering: str) -> None:
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), data(3, 4)

        def function(x: Tensor, first: nn.Module = first, second: nn.Module = second) -> tuple[Tensor, Tensor]:
            return first(x).tanh(), second(x).exp()

        used, _ = (encore.compile(function, lowering=lowering) if compiled else function)(x)
        used.sum().backward()
        found.append((used, x.grad, first.weight.grad))
        assert second.weight.grad is None or not second.weight.grad.any()
    for ours, theirs in zip(*found, strict=True):
        assert_same({"it": ours}, {"it": theirs}, lowering)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_autocast(around: bool, lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            low = not around or torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", torch.bfloat16, enabled=low, cache_enabled=False):
                y = self.layers(x)
            return y, self.layers[0](x)

    with torch.autocast("cpu", torch.bfloat16, enabled=around, cache_enabled=False):
        model = assert_matches_eager(Model(), data(), lowering=lowering, narrow=torch.bfloat16)
        assert model(data())[0].dtype == torch.bfloat16
