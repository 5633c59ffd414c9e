"""Budgets on a GPU bound what it runs out of: reserved bytes, with cuBLAS's workspaces, on each device by itself."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.reports.report import DeviceRow
from nullcuda.null_device import device_with
from nullcuda.random_models import random_model
from nullcuda.steps import Scored

MIB = 1 << 20
STEPS = 4
QUICK = (0, 1)
"""Seeds of models of which the quick tests are made."""


def clean() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._dynamo.reset()


def train(model: nn.Module, shape: tuple[int, ...], optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for _ in range(steps):
        batch = torch.randn(shape, device=next(model.parameters()).device)
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()


def made(seed: int, device: str = "cuda") -> tuple[nn.Module, tuple[int, ...], torch.optim.Optimizer]:
    model, shape, optimizer = random_model(seed)
    scored = Scored(model).to(device)
    return scored, shape, optimizer(scored.parameters(), lr=0.1)


def options(seed: int) -> dict[str, Any]:
    """Codes whose size follows the data cannot be tested where nothing is computed."""
    return {"lowering": "eager" if seed % 2 else "fused", "methods": ["recompute", "stash"]}


def on_gpu(model: Callable[..., Any], device: str = "cuda:0") -> DeviceRow:
    return next(row for row in encore.report(model).devices if row.device == device)


def floor_of(seed: int) -> int:
    """The lowest bytes that a model can reserve, from the error of a budget below."""
    clean()
    model, shape, optimizer = made(seed)
    encore.compile(model, budget="20MiB", optimizer=optimizer, **options(seed))
    with pytest.raises(encore.BudgetError, match=r"reserves .* of which .* are allocated") as error:
        train(model, shape, optimizer, steps=1)
    return error.value.floor


def check_capacity(seed: int) -> None:
    """A model trains on a device that has no more than its budget: nothing is out of memory, and no more is reserved
    than was predicted."""
    draw = random.Random(seed)
    budget = int(floor_of(seed) * draw.choice([1.0, 1.1, 1.3])) // (2 * MIB) * 2 * MIB
    clean()
    with device_with(capacity=budget):
        model, shape, optimizer = made(seed)
        encore.compile(model, budget=draw.choice(["device", budget]), optimizer=optimizer, **options(seed))
        train(model, shape, optimizer)
        row, reserved = on_gpu(model), torch.cuda.memory_reserved()
        assert row.reserved is not None
        assert reserved <= row.reserved <= max(1.06 * reserved, reserved + 2 * MIB)
        assert row.reserved <= budget == row.limit
        del model, optimizer
        clean()


@pytest.mark.parametrize("seed", QUICK)
def test_a_model_trains_where_the_device_is_its_budget(seed: int) -> None:
    check_capacity(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(QUICK), 50))
def test_random_models_train_where_the_device_is_their_budget(seed: int) -> None:
    check_capacity(seed)


def perceptron(device: str) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    return Scored(nn.Sequential(*blocks).to(device))


def test_what_others_take_is_not_in_the_budget_of_the_device() -> None:
    clean()
    with device_with(capacity=256 * MIB):
        other = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        model = perceptron("cuda")
        encore.compile(model, budget="device", lowering="eager")
        train(model, (4096, 256), torch.optim.SGD(model.parameters()))
        row = on_gpu(model)
        assert row.limit == 256 * MIB
        assert row.reserved is not None
        assert 100 * MIB < torch.cuda.memory_reserved() <= row.reserved <= 256 * MIB
        del other, model
        clean()


def test_the_report_says_what_is_reserved_next_to_what_is_allocated() -> None:
    clean()
    model = perceptron("cuda:1")
    encore.compile(model, budget="4GiB", lowering="eager")
    train(model, (2048, 256), torch.optim.SGD(model.parameters()))
    row = on_gpu(model, "cuda:1")
    assert row.reserved is not None
    assert row.reserved > row.allocated
    assert f"reserves {row.reserved / MIB:.2f} MiB of 4.00 GiB" in str(encore.report(model))
    assert torch.cuda.memory_reserved(1) == row.reserved


def test_the_device_is_no_budget_on_the_cpu() -> None:
    torch.zeros(1, device="cuda")
    model = encore.compile(Scored(nn.Linear(4, 4)), budget="device")
    with pytest.raises(encore.OptionError, match="the memory of a GPU"):
        model(torch.randn(2, 4))


class TwoDevices(nn.Module):
    """A model on two devices, the larger half on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 512).to("cuda:0"), perceptron("cuda:1")
        self.between = nn.Linear(512, 256).to("cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(self.between(self.first(x).relu().to("cuda:1")))
        return loss


def train_on_two(budget: Any, rows: int = 4096) -> tuple[nn.Module, list[int]]:
    clean()
    model = TwoDevices()
    encore.compile(model, budget=budget, lowering="eager", methods=["recompute", "stash"])
    peaks: list[int] = []
    for _ in range(STEPS):
        model.zero_grad()
        x = torch.randn(rows, 256, device="cuda:0")
        before = [torch.cuda.memory_allocated(number) for number in (0, 1)]
        for number in (0, 1):
            torch.cuda.reset_peak_memory_stats(number)
        model(x).backward()
        peaks = [torch.cuda.max_memory_allocated(number) - before[number] for number in (0, 1)]
    return model, peaks


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_two_devices_are_accounted_apart(budget: str) -> None:
    model, peaks = train_on_two(budget)
    assert [on_gpu(model, device).step_peak for device in ("cuda:0", "cuda:1")] == peaks
    assert "on cuda:1" in str(encore.report(model))


def test_each_of_two_devices_must_fit() -> None:
    model, _ = train_on_two("100%")
    rows = [on_gpu(model, device) for device in ("cuda:0", "cuda:1")]
    most = max(row.allocated for row in rows)
    share = 0.6
    model, peaks = train_on_two(f"{share:.0%}")
    found = [on_gpu(model, device) for device in ("cuda:0", "cuda:1")]
    assert all(row.allocated <= share * most for row in found)
    assert sum(row.allocated for row in rows) > most  # their sum is nobody's bound
    assert [row.step_peak for row in found] == peaks
    with device_with(capacity=200 * MIB):
        model, _ = train_on_two("device")
        for number in (0, 1):
            row = on_gpu(model, f"cuda:{number}")
            assert row.reserved is not None
            assert torch.cuda.memory_reserved(number) <= row.reserved <= 200 * MIB
        del model
        clean()


def test_the_first_batch_is_freed_without_the_garbage_collector() -> None:
    clean()
    model = perceptron("cuda")
    encore.compile(model, budget="4GiB")
    x = torch.randn(512, 256, device="cuda")
    first = weakref.ref(x)
    gc.disable()
    try:
        for _ in range(2):
            model(x).backward()
            x = torch.randn(512, 256, device="cuda")
        assert first() is None
    finally:
        gc.enable()


class Halves(nn.Module):
    """Two graphs, and a number between them that a rehearsal cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        self.second = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.seen = x.detach().sum().item()
        return self.second(x).sum()


def test_a_step_of_several_calls_fits_the_device_or_is_an_error() -> None:
    def reserved(budget: int) -> int:
        """What five steps reserve; the negative floor if the budget is rejected."""
        clean()
        model = Halves().to("cuda")
        encore.compile(model, budget=budget, lowering="eager")
        try:
            train(model, (8192, 256), torch.optim.SGD(model.parameters()), steps=5)
        except encore.BudgetError as error:
            return -error.floor
        return torch.cuda.memory_reserved()

    found = {budget: reserved(budget) for budget in range(96 * MIB, 257 * MIB, 16 * MIB)}
    rejected = {budget: -taken for budget, taken in found.items() if taken < 0}
    assert 0 < len(rejected) < len(found)
    assert all(floor > budget for budget, floor in rejected.items())
    assert max(rejected) < min(found.keys() - rejected.keys())
    # What plain code allocates between the calls is not seen on a GPU.
    assert all(taken <= 1.05 * budget for budget, taken in found.items()), found
