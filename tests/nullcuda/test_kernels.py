"""Fused kernels on CUDA: Inductor's Triton kernels are taken, and are fewer launches than eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from encore.kernels.gpu import has_gpu_kernels
from encore.lower.kernels import Compilation, KernelStore
from encore.schedule.kernel import Kernel
from nullcuda.null_device import counted
from nullcuda.steps import Scored, compiled_step


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Tanh()).cuda()


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16),
        nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ).cuda()  # fmt: skip


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 64), nn.LayerNorm(64)).cuda()


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).cuda()


@pytest.mark.parametrize(
    ("make", "shape"),
    [(network, (512, 64)), (dropout, (512, 64)), (convolutions, (8, 3, 32, 32)), (transformer, (4, 32, 64))],
)
def test_kernels_are_compiled_and_launched(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, device="cuda")
    eager = Scored(make())
    for _ in range(2):
        eager(x).backward()
        eager.zero_grad()
    plain = counted(lambda: eager(x).backward())
    step = compiled_step(make(), [x], overhead=0)
    assert step.counts.triton_launches > 0
    assert step.counts.launches + step.counts.triton_launches <= 1.1 * plain.launches
    assert step.measured <= step.predicted
    assert step.report.graphs[0].kernels > 0


def test_kernels_are_found_on_disk_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[KernelStore, list[Kernel], Compilation]] = []
    compile_kernels = KernelStore.compile

    def noted(store: KernelStore, kernels: Iterable[Kernel]) -> Compilation:
        kernels = list(kernels)
        asked.append((store, kernels, compile_kernels(store, kernels)))
        return asked[-1][2]

    monkeypatch.setattr(KernelStore, "compile", noted)
    compiled_step(network(), [torch.randn(512, 64, device="cuda")], overhead=0)
    monkeypatch.undo()
    assert any(kernels for _, kernels, _ in asked)
    for store, kernels, first in asked:
        again = KernelStore(store.folder).compile(kernels)
        assert (again.fresh, again.failed) == (0, {})
        assert again.compiled.keys() == first.compiled.keys() == {kernel.key for kernel in kernels}


@pytest.fixture
def _without_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path / "encore"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    has_gpu_kernels.cache_clear()
    yield
    has_gpu_kernels.cache_clear()


@pytest.mark.usefixtures("_without_compilers")
def test_without_a_c_compiler_steps_run_on_pytorchs_operators() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 64), nn.ReLU(), nn.LayerNorm(64))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step = compiled_step(model.cuda(), [torch.randn(512, 64, device="cuda")], budget="min")
    assert any("C compiler" in str(warning.message) for warning in seen)
    assert step.measured <= step.predicted


@pytest.mark.usefixtures("_without_compilers")
def test_without_a_c_compiler_no_kernel_of_encores_is_launched() -> None:
    with pytest.warns(UserWarning, match="needs a C compiler"):
        assert not has_gpu_kernels(torch.device("cuda"), "codecs run on PyTorch's operators")
