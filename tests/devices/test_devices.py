"""What differs between devices is in one room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import encore
from encore.devices import KINDS, default_generators, devices_in_use, free_bytes, generators_kept, is_here, kind_of
from encore.graph import Primal, UnsupportedGraphError, build_graph
from encore.graph.values import Role

PACKAGE = Path(encore.__file__).parent
BACKENDS = ("torch.cuda", "torch.xpu", "torch.mps")
IMPORTS = (*BACKENDS, *(f"torch import {one.removeprefix('torch.')}" for one in BACKENDS))


def test_torch_cuda_is_used_in_one_file_and_its_private_api_in_another() -> None:
    using = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and ast.unparse(node).startswith(BACKENDS))
        or (isinstance(node, ast.Import | ast.ImportFrom) and any(one in ast.unparse(node) for one in IMPORTS))
    }
    assert using == {"devices/accelerator.py", "devices/torch_private.py"}


def test_kinds() -> None:
    assert [kind_of("cuda:1"), kind_of(torch.device("cpu")), kind_of("mps")] == ["cuda", "cpu", "mps"]
    assert is_here("cpu")
    assert not is_here("xpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_process_without_accelerators() -> None:
    assert devices_in_use() == []
    assert not is_here("cuda:0")
    with pytest.raises(RuntimeError):
        free_bytes("cuda:0")


def test_generators_are_kept() -> None:
    before = torch.get_rng_state()
    with generators_kept():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert default_generators()[0] is torch.default_generator


def test_graphs_on_unknown_devices_are_rejected() -> None:
    with FakeTensorMode():
        x = torch.empty(4, device="xpu")
        joint = make_fx(lambda primals: primals.sin() * 2)(x)
    with pytest.raises(UnsupportedGraphError, match="on xpu:0; Encore plans steps on CPUs and CUDA devices"):
        build_graph(joint, primals=[Primal(Role.INPUT, leaf=False, identity=None)], returned=[])


def test_a_model_on_a_device_that_is_not_in_the_table_runs_as_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has none: for once, CPUs are not in the table."""
    monkeypatch.setattr("encore.graph.build.KINDS", {"cuda": KINDS["cuda"]})
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x, weights = torch.randn(4, 8), list(model.parameters())
    expected = torch.autograd.grad(model(x).sum(), weights)
    encore.compile(model, budget="60%")
    with pytest.warns(UserWarning, match="tensors on cpu; Encore plans steps on CPUs and CUDA devices"):
        found = torch.autograd.grad(model(x).sum(), weights)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_estimates_for_devices_without_a_profile_say_which_there_are(device: str) -> None:
    with pytest.raises(encore.OptionError, match=f"device={device!r} is not known.*known are .*'H100'"):
        encore.estimate(torch.nn.Linear(8, 8), torch.randn(2, 8), device=device)
