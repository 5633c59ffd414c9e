"""Hooks and parametrizations that are added, replaced or removed between steps change the step as they do in eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrizations, parametrize, prune

import encore
from support.compare_with_eager import assert_same, run_step, session_of


class Handle(Protocol):
    def remove(self) -> Any: ...


class Net(nn.Module):
    """Layers at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.first(x).tanh())


class Idle(nn.Module):
    """A layer without operators, and a graph break behind it: Dynamo finds no graph up to there."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Identity()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.idle(x)
        torch._dynamo.graph_break()
        return self.layer(x)


def scaled(gradients: tuple[Tensor | None, ...], factor: float) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * factor for gradient in gradients)


ON_A_MODULE: dict[str, Callable[[nn.Module, float], Handle]] = {
    "forward": lambda on, by: on.register_forward_hook(lambda _, args, out: out * by),
    "forward with keywords": lambda on, by: on.register_forward_hook(
        lambda _, args, kwargs, out: out * by, with_kwargs=True
    ),
    "forward always": lambda on, by: on.register_forward_hook(lambda _, args, out: out * by, always_call=True),
    "forward pre": lambda on, by: on.register_forward_pre_hook(lambda _, args: (args[0] * by,)),
    "full backward": lambda on, by: on.register_full_backward_hook(lambda _, into, out: scaled(into, by)),  # type: ignore[arg-type, return-value]
    "full backward pre": lambda on, by: on.register_full_backward_pre_hook(lambda _, out: scaled(out, by)),  # type: ignore[arg-type, return-value]
}
ON_ALL_MODULES: dict[str, Callable[[float], Handle]] = {
    "forward": lambda by: module_hooks.register_module_forward_hook(
        lambda on, args, out: out * by if isinstance(on, nn.Linear) else None
    ),
    "forward pre": lambda by: module_hooks.register_module_forward_pre_hook(
        lambda on, args: (args[0] * by,) if isinstance(on, nn.Linear) else None  # type: ignore[arg-type]
    ),
    "full backward": lambda by: module_hooks.register_module_full_backward_hook(
        lambda on, into, out: scaled(into, by)  # type: ignore[arg-type, return-value]
    ),
    "full backward pre": lambda by: module_hooks.register_module_full_backward_pre_hook(
        lambda on, out: scaled(out, by)  # type: ignore[arg-type, return-value]
    ),
}
ON_A_PARAMETER: dict[str, Callable[[Tensor, float], Handle]] = {
    "hook": lambda on, by: on.register_hook(lambda gradient: gradient * by),
    "post accumulate": lambda on, by: on.register_post_accumulate_grad_hook(lambda tensor: scale_in_place(tensor, by)),
}
DEFAULT = ("forward", "forward pre", "full backward", "full backward pre")
"""Kinds of hooks whose tests `make test` runs; it leaves the others to `make test-all`."""
PLACES = {"root": "", "layer": "first", "nested layer": "blocks.2"}


def scale_in_place(tensor: Tensor, by: float) -> None:
    assert tensor.grad is not None
    tensor.grad.mul_(by)


def legacy_weight_norm(layer: nn.Module) -> None:
    with warnings.catch_warnings(action="ignore"):
        nn.utils.weight_norm(layer)


REPARAMETRIZED: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "weight_norm": (parametrizations.weight_norm, lambda on: parametrize.remove_parametrizations(on, "weight")),
    "spectral_norm": (parametrizations.spectral_norm, lambda on: parametrize.remove_parametrizations(on, "weight")),
    "torch.nn.utils.weight_norm": (legacy_weight_norm, nn.utils.remove_weight_norm),
    "prune": (lambda on: prune.l1_unstructured(on, "weight", 0.5), lambda on: prune.remove(on, "weight")),  # type: ignore[no-untyped-call]
}


class Pair:
    """A compiled model next to an eager one with the same parameters."""

    def __init__(self, eager: nn.Module, *, backend: bool = False) -> None:
        self.eager = eager
        self.inner = copy.deepcopy(eager)
        self.compiled = self.inner
        if backend:
            self.compiled = torch.compile(self.inner, backend="encore", options={"lowering": "eager"})  # type: ignore[assignment]
        else:
            encore.compile(self.inner, lowering="eager")

    def change(self, how: Callable[[nn.Module], Any]) -> list[Any]:
        """Apply a change to both."""
        found = []
        for model in (self.inner, self.eager):
            torch.manual_seed(1)
            found.append(how(model))
        return found

    def check(self) -> dict[str, Tensor]:
        """Run a step of both and return the results of eager, which are those of the compiled model."""
        self.inner.zero_grad()
        self.eager.zero_grad()
        x = torch.arange(24.0).reshape(4, 6).sin().requires_grad_()
        have = {name.replace("_orig_mod.", ""): tensor for name, tensor in run_step(self.compiled, (x,)).items()}
        want = run_step(self.eager, (x,))
        assert_same(have, want, "eager")
        return want


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() != other.keys() or any(not torch.equal(one[name], other[name]) for name in one)


@contextmanager
def attached(handles: list[Handle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, marks=() if place == "layer" and kind in DEFAULT else pytest.mark.slow)
        for kind in ON_A_MODULE
        for place in PLACES
    ],
)
def test_a_module_hook_comes_changes_and_goes(kind: str, place: str) -> None:
    models = Pair(Net())
    without = models.check()
    with attached(models.change(lambda model: ON_A_MODULE[kind](model.get_submodule(PLACES[place]), 2.0))):
        with_hook = models.check()
    with attached(models.change(lambda model: ON_A_MODULE[kind](model.get_submodule(PLACES[place]), 3.0))):
        assert differs(models.check(), with_hook)
    assert not differs(models.check(), without)
    assert differs(with_hook, without)


@pytest.mark.parametrize("kind", ["forward", "full backward"])
def test_a_hook_of_before_the_first_step_goes(kind: str) -> None:
    eager = Net()
    compiled = copy.deepcopy(eager)
    handles = [ON_A_MODULE[kind](model.first, 2.0) for model in (compiled, eager)]
    encore.compile(compiled, lowering="eager")
    x = torch.randn(4, 6, requires_grad=True)
    assert_same(run_step(compiled, (x,)), run_step(eager, (x,)), "eager")
    for handle in handles:
        handle.remove()
    assert_same(run_step(compiled, (x,)), run_step(eager, (x,)), "eager")


@pytest.mark.parametrize("kind", ON_ALL_MODULES)
def test_a_hook_of_all_modules_comes_and_goes(kind: str) -> None:
    models = Pair(Net())
    without = models.check()
    with attached([ON_ALL_MODULES[kind](2.0)]):
        assert differs(models.check(), without)
    assert not differs(models.check(), without)


@pytest.mark.parametrize("kind", ["forward", "full backward"])
def test_a_hook_where_dynamo_finds_no_graph(kind: str) -> None:
    models = Pair(Idle())
    without = models.check()
    with attached(models.change(lambda model: ON_A_MODULE[kind](model.idle, 2.0))):  # type: ignore[arg-type]
        assert differs(models.check(), without)
    assert not differs(models.check(), without)


@pytest.mark.parametrize("kind", ON_A_PARAMETER)
def test_a_hook_on_a_parameter_comes_and_goes(kind: str) -> None:
    models = Pair(Net())
    without = models.check()
    with attached(models.change(lambda model: ON_A_PARAMETER[kind](model.first.weight, 2.0))):  # type: ignore[arg-type, union-attr]
        assert differs(models.check(), without)
    assert not differs(models.check(), without)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "weight_norm" else pytest.mark.slow) for kind in REPARAMETRIZED]
)
def test_a_weight_is_reparametrized_after_the_first_step(kind: str) -> None:
    models = Pair(Net())
    without = models.check()
    apply, remove = REPARAMETRIZED[kind]
    models.change(lambda model: apply(model.first))  # type: ignore[arg-type]
    assert differs(models.check(), without)
    models.change(lambda model: remove(model.first))  # type: ignore[arg-type]
    models.check()


@pytest.mark.parametrize("kind", ["forward", "full backward"])
def test_through_torch_compile(kind: str) -> None:
    models = Pair(nn.Sequential(Net()), backend=True)
    without = models.check()

    def layer(model: nn.Module) -> nn.Module:
        return next(module for module in model.modules() if isinstance(module, nn.Linear))

    with attached(models.change(lambda model: ON_A_MODULE[kind](layer(model), 2.0))):
        assert differs(models.check(), without)
    assert not differs(models.check(), without)


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_a_hook_of_all_modules_through_torch_compile() -> None:
    models = Pair(Net(), backend=True)
    without = models.check()
    with attached([ON_ALL_MODULES["forward"](2.0)]):
        assert differs(models.check(), without)
    assert not differs(models.check(), without)


def test_without_a_change_nothing_is_compiled_again() -> None:
    models = Pair(Net())
    models.check()
    with attached(models.change(lambda model: model.first.register_forward_hook(lambda _, args, out: None))):  # type: ignore[operator, union-attr]
        for _ in range(3):
            models.check()
    models.check()
    assert len(session_of(models.inner).graphs) == 2
