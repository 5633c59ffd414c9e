"""Two processes on gloo: buckets of DistributedDataParallel are reduced while backward runs, not after it."""

from __future__ import annotations

import os
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

RANKS = 2
WIDTH = 64
LAYERS = 6
LAYERS_IN_BACKWARD = [f"layer {number}" for number in range(LAYERS - 1, 0, -1)]
"""The input of the first needs no gradient."""
events: list[str] = []


@torch.library.custom_op("encore_tests::marked", mutates_args=())
def marked(x: Tensor, layer: int) -> Tensor:
    return x.clone()


@torch.library.custom_op("encore_tests::backward_came_to", mutates_args=())
def backward_came_to(x: Tensor, layer: int) -> Tensor:
    events.append(f"layer {layer}")
    return x.clone()


marked.register_fake(lambda x, layer: torch.empty_like(x))
backward_came_to.register_fake(lambda x, layer: torch.empty_like(x))
marked.register_autograd(
    lambda ctx, gradient: (backward_came_to(gradient, ctx.layer), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "layer", inputs[1]),
)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(marked(x, self.number)).tanh()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(number) for number in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def note_bucket(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    events.append("bucket")
    work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# DistributedDataParallel compares annotations with the classes themselves.
note_bucket.__annotations__.update(bucket=vars(dist)["GradBucket"], **{"return": torch.futures.Future[Tensor]})


def train(arrangement: str, rank: int) -> tuple[list[str], list[Tensor]]:
    """The events of the third step, and its gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Layers()
    if arrangement == "inside":
        encore.compile(model, lowering="eager", overhead=0)
    parallel = DistributedDataParallel(model, bucket_cap_mb=1.5 * 4 * WIDTH**2 / 2**20)  # type: ignore[arg-type]
    parallel.register_comm_hook(None, note_bucket)
    called = encore.compile(parallel, lowering="eager", overhead=0) if arrangement == "outside" else parallel
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        parallel.zero_grad()
        loss = called(torch.randn(4, WIDTH, generator=generator))
        events.clear()
        loss.backward()
    return list(events), [parameter.grad.clone() for parameter in parallel.parameters()]  # type: ignore[union-attr]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    try:
        found = {arrangement: train(arrangement, rank) for arrangement in ("plain", "inside", "outside")}
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_buckets_are_reduced_during_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    mp.spawn(work, (str(tmp_path),), nprocs=RANKS)  # type: ignore[attr-defined]
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        expected, gradients = found.pop("plain")
        for arrangement, (seen, ours) in found.items():
            layers = [what for what in seen if what != "bucket"]
            assert layers == [what for what in expected if what != "bucket"] == LAYERS_IN_BACKWARD
            for one, other in zip(ours, gradients, strict=True):
                assert torch.equal(one, other), arrangement
            begun = zip(layers_before_buckets(seen), layers_before_buckets(expected), strict=False)
            assert all(one <= other for one, other in begun), (arrangement, seen, expected)
            assert layers_before_buckets(seen)[0] == 1, arrangement


def layers_before_buckets(seen: list[str]) -> list[int]:
    """How many layers backward has been through at each bucket."""
    return [place - number for number, place in enumerate(place for place, what in enumerate(seen) if what == "bucket")]
