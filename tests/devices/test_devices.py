"""What differs between devices is in one room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import encore
from encore.devices import default_generators, devices_in_use, free_bytes, generators_kept, is_here, kind_of
from encore.graph import Primal, UnsupportedGraphError, build_graph
from encore.graph.values import Role

PACKAGE = Path(encore.__file__).parent


def test_torch_cuda_is_used_in_one_file() -> None:
    using = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda")
    }
    assert using == {"devices/accelerator.py"}


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
