"""Pairs of recurrent modules, torch.nn's and Encore's, and functions that compare them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode

import encore
from encore.cost.allocations import measure_cpu
from encore.rnn import WORKSPACES, layer, native, plain
from support.rounding import assert_all_as_accurate, doubled

KINDS = ("LSTM", "GRU", "RNN")


def pair(kind: str, *args: Any, stash: str | int = "fast", **options: Any) -> tuple[nn.Module, nn.Module]:
    """torch.nn's module and Encore's, with the same parameters."""
    theirs = getattr(nn, kind)(*args, **options)
    ours = getattr(encore.nn, kind)(*args, stash=stash, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def tensors(result: Any) -> Iterator[Tensor]:
    """All floating-point tensors in a module's result."""
    if isinstance(result, PackedSequence):
        yield result.data
    elif isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from tensors(item)


def run(
    module: nn.Module, *args: Any, wanted: list[Tensor], seed: int = 1, retain_graph: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of `wanted` and all parameters, for random gradients of all outputs."""
    torch.manual_seed(seed)
    outputs = list(tensors(module(*args)))
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(out.shape, generator=generator, dtype=torch.float64).float().to(out.dtype) for out in outputs]
    found = torch.autograd.grad(outputs, [*wanted, *module.parameters()], grads, retain_graph=retain_graph)
    return [output.detach() for output in outputs], list(found)


def everything(module: nn.Module, *args: Any, wanted: list[Tensor], retain_graph: bool = False) -> list[Tensor]:
    """Outputs and gradients in one list."""
    outputs, grads = run(module, *args, wanted=wanted, retain_graph=retain_graph)
    return [*outputs, *grads]


def in_double(module: nn.Module, *args: Any, wanted: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients of the module's copy in float64. Those of `wanted` come back in the type that it has."""
    twin = copy.deepcopy(module).double()
    return everything(twin, *(_doubled(arg) for arg in args), wanted=wanted, retain_graph=True)


def _doubled(arg: Any) -> Any:
    return arg.double() if isinstance(arg, PackedSequence) else doubled(arg)


def assert_as_torch(found: list[Tensor], theirs: nn.Module, *args: Any, wanted: list[Tensor]) -> None:
    """Outputs and gradients are as close to float64 as those of `theirs`, which is PyTorch's own module."""
    exact = in_double(theirs, *args, wanted=wanted)
    assert_all_as_accurate(found, everything(theirs, *args, wanted=wanted, retain_graph=True), exact)


@contextmanager
def kernels(chosen: ModuleType) -> Iterator[None]:
    """Steps by these functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "_cpu_kernels", lambda: chosen)
        yield


both_kernels: Callable[[Any], Any] = pytest.mark.parametrize(
    "steps", [native, plain], ids=["native", "plain"]
)  # fmt: skip


class Workspace(TorchDispatchMode):
    """Measures each of the operators: what it allocated at its worst moment beyond what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in WORKSPACES:
            return func(*args, **(kwargs or {}))
        told = WORKSPACES[func](*args)
        measured = measure_cpu(lambda: func(*args))
        self.seen.append((func, told, measured.step_peak - measured.left))
        return measured.result
