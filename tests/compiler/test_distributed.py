"""Two processes on gloo: DistributedDataParallel around Encore and Encore around it give eager's gradients.

The processes share one folder of kernels and compile the same ones at the same time.
"""

from __future__ import annotations

import itertools
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import encore
from encore.options import LOWERINGS
from support.compare_with_eager import assert_same

RANKS = 2
STEPS = 3
ARRANGEMENTS = ("outside", "inside", "small buckets")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def arranged(arrangement: str, lowering: str) -> tuple[nn.Module, nn.Module]:
    """The module to call, and the one that was compiled."""
    torch.manual_seed(0)
    model = Model()
    if arrangement == "eager":
        return DistributedDataParallel(model), model
    if arrangement == "outside":
        whole = DistributedDataParallel(model)
        return encore.compile(whole, lowering=lowering), whole
    buckets = {"bucket_cap_mb": 1e-4} if arrangement == "small buckets" else {}
    return DistributedDataParallel(encore.compile(model, lowering=lowering), **buckets), model  # type: ignore[arg-type]


def train(arrangement: str, lowering: str, rank: int) -> dict[str, Any]:
    """A few optimizer steps on this process's share of the data."""
    torch._dynamo.reset()
    model, compiled = arranged(arrangement, lowering)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    torch.manual_seed(rank)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    for _ in range(STEPS):
        loss = model(torch.randn(5, 6, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        found["losses"].append(loss.detach())
        found["gradients"].append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
        optimizer.step()
    with torch.no_grad():  # accumulate without talking: no_sync is a part of what users do
        model.zero_grad()
    with model.no_sync():  # type: ignore[operator]
        model(torch.randn(5, 6, generator=generator)).backward()
    model(torch.randn(5, 6, generator=generator)).backward()
    found["gradients"].append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
    found["parameters"] = [parameter.detach().clone() for parameter in model.parameters()]
    found["buffers"] = [buffer.clone() for buffer in model.buffers()]
    found["generator"] = torch.get_rng_state()
    if arrangement != "eager":
        report = encore.report(compiled)
        found["planned operators"] = sum(graph.operators for graph in report.graphs)
        found["plain"] = list(report.plain)
    return found


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    results: dict[Any, Any] = {}
    try:
        for which in ("eager", *itertools.product(ARRANGEMENTS, LOWERINGS)):
            arrangement, lowering = ("eager", "") if which == "eager" else which
            try:
                results[which] = train(arrangement, lowering, rank)
            except Exception:
                results[which] = {"error": traceback.format_exc()}
            torch.save(results, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each process found, by rank."""
    folder = tmp_path_factory.mktemp("processes")
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        mp.spawn(work, (str(folder),), nprocs=RANKS, join=True)  # type: ignore[attr-defined]
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def numbered(name: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"{name} {number}": tensor for number, tensor in enumerate(tensors)}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_process_trains_as_it_would_in_eager(
    trained: list[dict[Any, Any]], arrangement: str, rank: int, lowering: str
) -> None:
    have, want = trained[rank][arrangement, lowering], trained[rank]["eager"]
    assert "error" not in have, have["error"]
    for part in ("losses", "parameters", "buffers"):
        assert_same(numbered(part, have[part]), numbered(part, want[part]), lowering)
    for step, (ours, theirs) in enumerate(zip(have["gradients"], want["gradients"], strict=True)):
        assert_same(numbered(f"step {step}", ours), numbered(f"step {step}", theirs), lowering)
    assert torch.equal(have["generator"], want["generator"])
    assert have["planned operators"] > 10
    assert have["plain"] == []


def test_the_processes_agree_and_saw_different_data(trained: list[dict[Any, Any]]) -> None:
    first, second = (results["eager"] for results in trained)
    assert all(torch.equal(a, b) for a, b in zip(first["parameters"], second["parameters"], strict=True))
    assert not torch.equal(first["losses"][0], second["losses"][0])
