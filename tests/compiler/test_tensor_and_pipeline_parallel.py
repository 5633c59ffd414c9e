"""Tensor parallelism and pipeline stages on two processes: the same gradients, and a word about budgets of stages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import encore
from support.sharded_models import LENGTH, WIDTH, Block, run_ranks

pytestmark = pytest.mark.slow
STEPS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return made


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tensor_parallel(options: dict[str, Any] | None) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = Feedforward(), init_device_mesh("cpu", (2,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if options is not None:
        encore.compile(model, **options)
    found: dict[str, Any] = {"gradients": []}
    for step in range(STEPS):
        model.zero_grad()
        loss = model(torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        found["gradients"] += [one.grad.to_local().clone() for one in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    found["peak"] = encore.measure(lambda: model(torch.ones(512, WIDTH)).backward()).step_peak
    if options is not None:
        report = encore.report(model)
        found["plain"] = report.plain
        found["predicted"], found["resident"] = report.planned.step_peak, report.resident
        found["unplanned"] = report.unplanned.step_peak
    return found


def with_tensors(_: int) -> list[dict[str, Any]]:
    return [tensor_parallel(one) for one in (None, {"lowering": "eager", "budget": "75%"})]


def test_tensor_parallel_models_train_within_a_budget(tmp_path: Path) -> None:
    for plain, planned in run_ranks(with_tensors, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(plain["gradients"], planned["gradients"], strict=True))
        assert not planned["plain"]
        resident = planned["resident"]
        assert resident + planned["predicted"] <= 0.75 * (resident + planned["unplanned"])
        assert planned["peak"] < plain["peak"]


class Stage(nn.Module):
    """Two blocks of a model that goes on in another process."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipeline(rank: int, options: dict[str, Any] | None) -> tuple[list[Tensor], list[str]]:
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = Stage()
    if options is not None:
        encore.compile(model, **options)
    schedule = ScheduleGPipe(PipelineStage(model, rank, 2, torch.device("cpu")), n_microbatches=4, loss_fn=squared)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(STEPS):
            x = torch.randn(8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x)
    texts = [str(one.message) for one in told if "encore" in str(one.message)]
    return [one.grad.clone() for one in model.parameters() if one.grad is not None], texts


def with_stages(rank: int) -> list[Any]:
    options = (None, {"lowering": "eager"}, {"lowering": "eager", "budget": "4MiB"})
    return [pipeline(rank, one) for one in options]


def test_pipeline_stages_train_and_are_told_what_microbatches_keep(tmp_path: Path) -> None:
    for plain, unbounded, bounded in run_ranks(with_stages, tmp_path):
        for gradients, _ in (unbounded, bounded):
            assert all(torch.equal(a, b) for a, b in zip(plain[0], gradients, strict=True))
        assert unbounded[1] == []
        (told,) = bounded[1]
        assert "a budget bounds one call" in told
        assert "MiB" in told
