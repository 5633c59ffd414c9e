"""Kernels compiled, kept on disk, loaded again, and done without."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from encore.lower import extension, kernel_store, kernels, torch_private
from encore.lower.extension import CppFunction, LoweringError
from encore.lower.kernels import Compilation, KernelStore
from encore.schedule import Fused, fuse
from encore.schedule.kernel import Kernel, Operand
from support.captured_graphs import captured
from support.compare_with_eager import assert_same, run_step, session_of
from support.eager_kernels import one_by_one
from support.kernel_caches import with_header
from support.rounding import assert_close


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder of kernels, a space in its name."""
    empty = tmp_path / "a folder"
    empty.mkdir(0o700)
    return empty


def kernel_of(function: Callable[..., Any], *args: Any) -> Kernel:
    """The last kernel of a function's forward."""
    torch._dynamo.reset()
    schedule = fuse(captured(function, *args).plan.schedule)
    return [action for action in schedule.forward if isinstance(action, Fused)][-1].kernel


def matrix(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 5)), requires_grad=True)


def wave(x: Tensor) -> Tensor:
    return (x * 2).sin() + 1


def made_up(operand: Operand) -> Tensor:
    """Numbers laid out as a kernel wants them."""
    tensor = torch.empty_strided(operand.shape, operand.stride, dtype=operand.dtype)
    memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
    if operand.dtype.is_floating_point:
        memory.normal_()
    else:
        memory.random_(0, 2)
    return tensor


def in_kernel(made: Compilation, kernel: Kernel, operands: Sequence[Tensor]) -> list[Tensor]:
    """What the compiled kernel gives, in the order of its outputs; operands it writes over are changed."""
    returned = list(made.compiled[kernel.key].call(list(operands)))
    over = dict(kernel.over)
    return [operands[over[place]] if place in over else returned.pop(0) for place in range(len(kernel.outputs))]


# -- the same numbers ------------------------------------------------------------------------------------------------


def with_over(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight) + (weight @ x)).exp() + (x @ x)


def softmax_over(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The loop that writes over an operand reads nothing of the softmax but its result."""
    shares = ((x @ x) * mask).softmax(-1)
    return shares, shares * 1.5


def transposed(x: Tensor) -> Tensor:
    return (x.t() * 2).sin() + x.t()


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "pointwise": (wave, (matrix(),)),
    "several results": (lambda x, y: ((x * y).sin(), (x * y).cos() + 1), (matrix(), matrix())),
    "a reduction": (lambda x: (x * 2).exp().sum(0) + 1, (matrix(),)),
    "softmax": (lambda x: (x * 2).softmax(-1) * 3, (matrix(),)),
    "layer norm": (lambda x, w: torch.layer_norm(x * 2, (5,), w) + 1, (matrix(), matrix(5))),
    "broadcast": (
        lambda x, row, one: (x * row + one).tanh() * 2,
        (matrix(), matrix(5), torch.randn((), requires_grad=True)),
    ),
    "bfloat16": (lambda x: (x * 2).exp() + 1, (matrix().detach().bfloat16().requires_grad_(),)),
    "float64": (lambda x: (x * 2).exp() + 1, (matrix().detach().double().requires_grad_(),)),
    "a cast": (lambda x: (x.double() * 2).exp().float() + 1, (matrix(),)),
    "bool": (lambda x, mask: torch.where(mask & (x > 0), x * 2, -x) + 1, (matrix(), torch.rand(3, 5) > 0.5)),
    "int64": (lambda x, index: torch.gather(x * 2, 1, index * 2).sin(), (matrix(), torch.randint(0, 2, (3, 2)))),
    "a transposed operand": (transposed, (matrix(),)),
    "a strided operand": (lambda x: (x * 2).sin() + 1, (matrix(6, 5).detach()[::2].requires_grad_(),)),
    "an expanded operand": (lambda x: (x * 2).sin() + 1, (matrix(1, 5).detach().expand(3, 5).requires_grad_(),)),
    "a transposed result": (lambda x: ((x * 2).t().contiguous().t() * 2).sin(), (matrix(),)),
    "joined": (lambda x, y: (torch.cat([x * 2, y.exp()], 1) * 3, x.sin()), (matrix(), matrix())),
    "written over an operand": (with_over, (matrix(4, 4), matrix(4, 4))),
    "softmax over an operand": (softmax_over, (matrix(16, 16), torch.rand(16, 16))),
    "no operand with a dimension": (lambda x: (x * 2).sin() + 1, (torch.randn((), requires_grad=True),)),
    "one element": (lambda x: (x * 2).sin() + 1, (matrix(1, 1),)),
    "a large one": (lambda x: (x * 2).exp().sum(1) + 1, (matrix(300, 1000),)),
}


def test_kernels_give_what_their_operators_give_one_by_one() -> None:
    """All in one go, since the compiler takes a second for each file."""
    kernels = {name: kernel_of(function, *args) for name, (function, args) in FUNCTIONS.items()}
    made = kernel_store().compile(kernels.values())
    assert not made.failed
    for name, kernel in kernels.items():
        operands = [made_up(operand) for operand in kernel.operands]
        expected = one_by_one(kernel, copy.deepcopy(operands))
        untouched = [number for number in range(len(operands)) if number not in dict(kernel.over).values()]
        before = [operands[number].clone() for number in untouched]
        found = in_kernel(made, kernel, operands)
        for have, want, layout in zip(found, expected, kernel.layouts, strict=True):
            assert (have.dtype, have.shape, have.stride()) == (want.dtype, want.shape, layout), name
            if have.is_floating_point():
                assert_close(have, want, name)
            else:
                assert torch.equal(have, want), name
        for number, value in zip(untouched, before, strict=True):
            assert torch.equal(operands[number], value), f"{name} writes to an operand"
    assert kernels["written over an operand"].over
    assert kernels["softmax over an operand"].over
    strides = {name: kernels[name].operands[0].stride for name in kernels}
    assert strides["a strided operand"] == (10, 1)
    assert strides["an expanded operand"] == (0, 1)


# -- disk ------------------------------------------------------------------------------------------------------------


def test_another_store_on_the_same_folder_loads_what_the_first_compiled(folder: Path) -> None:
    kernel, x = kernel_of(wave, matrix()), torch.randn(3, 5)
    first = KernelStore(folder)
    assert first.workspace(kernel) is None
    assert first.compile([kernel]).fresh == 1
    assert first.compile([kernel, kernel]).fresh == 0, "it is in memory"
    second = KernelStore(folder)
    assert second.workspace(kernel) == 0
    made = second.compile([kernel])
    assert (made.fresh, dict(made.failed), list(made.compiled)) == (0, {}, [kernel.key])
    assert_close(made.compiled[kernel.key].call([x])[-1], wave(x))


def cut_off(record: Path) -> None:
    record.write_text(record.read_text()[:50])


def of_another_kind(record: Path) -> None:
    record.write_text("[1, 2]")


def with_other_fields(record: Path) -> None:
    record.write_text(json.dumps({"sauce": ""}))


def without_functions(record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), "functions": {}}))


@pytest.mark.parametrize("damage", [Path.unlink, cut_off, of_another_kind, with_other_fields, without_functions])
def test_a_damaged_kernel_is_compiled_again(folder: Path, damage: Callable[[Path], None]) -> None:
    kernel, x = kernel_of(wave, matrix()), torch.randn(3, 5)
    KernelStore(folder).compile([kernel])
    damage(folder / f"{kernel.key}.json")
    made = KernelStore(folder).compile([kernel])
    assert made.fresh == 1
    assert_close(made.compiled[kernel.key].call([x])[-1], wave(x))
    assert KernelStore(folder).compile([kernel]).fresh == 0


def test_nothing_but_a_kernel_and_its_structure_is_left_in_the_folder(folder: Path) -> None:
    KernelStore(folder).compile([kernel_of(wave, matrix())])
    kinds = sorted(path.suffix for path in folder.iterdir())
    assert kinds == [".json", ".so", ".structure"]


# -- kernels that fail -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Each of its layers has a kernel of its own, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).sin() * 2
        x = self.layers[1](x).tanh() + 1
        return (self.layers[2](x) * 3).sigmoid()


def assert_warned_once(caught: list[warnings.WarningMessage], reason: str) -> None:
    (warning,) = [entry for entry in caught if "encore" in str(entry.message)]
    assert "run one by one" in str(warning.message)
    assert reason in str(warning.message)


def fused_actions(model: Any) -> list[Fused]:
    (graph,) = session_of(model).graphs
    schedule = graph.plan.schedule
    return [action for action in schedule.forward + schedule.backward if isinstance(action, Fused)]


def train_beside_eager(seed: int = 0) -> tuple[Any, list[warnings.WarningMessage]]:
    """Two steps of a compiled net, compared with eager's; what was warned of meanwhile."""
    eager, x = Net(), torch.randn(4, 6)
    planned = encore.compile(copy.deepcopy(eager), lowering="fused")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same(run_step(planned, (x,)), run_step(eager, (x,)), "fused")
    return planned, caught


def test_without_a_compiler_operators_run_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encore.compiler.forms.kernel_store", lambda: KernelStore(folder))
    monkeypatch.setattr(torch_private, "missing_compiler", lambda: "no C++ compiler works here (sold)")
    planned, caught = train_beside_eager()
    assert fused_actions(planned) == []
    assert_warned_once(caught, "no C++ compiler works here (sold)")


def test_a_kernel_that_inductor_refuses_leaves_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_private.module_source

    def module_source(kernel: Kernel) -> str:
        if "tanh" in kernel.text:
            raise LoweringError("no tangents today")
        return right(kernel)

    monkeypatch.setattr("encore.compiler.forms.kernel_store", lambda: KernelStore(folder))
    monkeypatch.setattr(torch_private, "module_source", module_source)
    planned, caught = train_beside_eager()
    assert fused_actions(planned)
    assert not any("tanh" in action.kernel.text for action in fused_actions(planned))
    assert_warned_once(caught, "no tangents today")


def test_a_kernel_that_the_compiler_refuses_leaves_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = extension.extension_source

    def extension_source(module: str, functions: Sequence[CppFunction]) -> str:
        spoilt = any("tanh" in function.source for function in functions)
        return right(module, functions) + ("\n#error no tangents today\n" if spoilt else "")

    monkeypatch.setattr("encore.compiler.forms.kernel_store", lambda: KernelStore(folder))
    monkeypatch.setattr(kernels, "extension_source", extension_source)
    planned, caught = train_beside_eager()
    assert fused_actions(planned)
    assert_warned_once(caught, "the C++ compiler rejects it")
    assert_warned_once(caught, "no tangents today")


def test_what_a_store_refuses_it_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(wave, matrix())
    monkeypatch.setattr(torch_private, "missing_compiler", lambda: "none")
    made = KernelStore(folder).compile([kernel])
    assert (dict(made.compiled), dict(made.failed), made.fresh) == ({}, {kernel.key: "none"}, 0)


# -- processes -------------------------------------------------------------------------------------------------------

SCRIPT = """
    import json, sys, warnings
    import torch
    from torch import nn
    import encore
    from encore.lower.kernels import KernelStore

    fresh = []
    compile = KernelStore.compile
    def counted(self, kernels):
        made = compile(self, kernels)
        fresh.append(made.fresh)
        return made
    KernelStore.compile = counted

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Hardtanh(), nn.Linear(6, 6), nn.GELU(), nn.Softmax(-1))
    x = torch.randn(4, 6)
    model(x).sin().sum().backward()
    want = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        encore.compile(model, lowering="fused")(x).sin().sum().backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=3e-4, atol=3e-4)  # half of the digits
    said = [str(entry.message) for entry in caught if "encore" in str(entry.message)]
    print(json.dumps({"fresh": sum(fresh), "said": said}))
"""


def run_script(**environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_second_process_compiles_nothing_unless_an_extension_is_lost_or_broken(folder: Path) -> None:
    kernels = with_header(folder) / kernel_store().folder.name
    cache = str(folder)
    cold = run_script(ENCORE_CACHE_DIR=cache)
    assert cold["fresh"] > 0
    assert cold["said"] == []
    assert run_script(ENCORE_CACHE_DIR=cache) == {"fresh": 0, "said": []}
    for library in kernels.glob("*.so"):
        library.unlink()
    assert run_script(ENCORE_CACHE_DIR=cache) == cold
    for library in kernels.glob("*.so"):
        library.write_text("no library")
    assert run_script(ENCORE_CACHE_DIR=cache) == cold
    assert run_script(ENCORE_CACHE_DIR=cache) == {"fresh": 0, "said": []}


def test_a_header_in_a_folder_with_a_space_is_compiled_beside_itself(tmp_path: Path) -> None:
    header = tmp_path / "a folder" / "kernels.h"
    command = torch_private.header_command(header)
    assert str(header) in command
    assert str(header.with_name("kernels.h.gch")) in command


def test_a_process_without_a_compiler_says_so_once(tmp_path: Path) -> None:
    found = run_script(CXX="no-such-compiler", ENCORE_CACHE_DIR=str(tmp_path))
    assert found["fresh"] == 0
    (said,) = found["said"]
    assert "no C++ compiler works here" in said
