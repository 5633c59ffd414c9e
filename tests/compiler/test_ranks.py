"""Ranks of a distributed run whose clocks disagree run the same plan all the same."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import encore

RANKS = 2


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.sin(torch.tanh(layer(x)))
        return x.square().sum()


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        model = encore.compile(Stack(), lowering="eager", budget="70%")
        model(torch.randn(512, 32)).backward()
        torch.save(encore.report(model).plan, Path(folder) / f"plan-{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_the_first_rank_to_plan_decides(tmp_path: Path) -> None:
    spawn(work, (str(tmp_path),), nprocs=RANKS)
    plans = [torch.load(tmp_path / f"plan-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert plans[0] == plans[1]
    assert plans[0].graphs[0].fates["recompute"]


def disagree(rank: int, folder: str) -> None:
    """One rank has been told another cost for everything: by itself it would plan something else."""
    if rank:
        vars(import_module("encore.cost.seconds"))["op_roofline"] = lambda graph, op, rates: 1.0 / (1 + op.id)
    work(rank, folder)


def test_ranks_that_disagree_about_costs_agree_about_the_plan(tmp_path: Path) -> None:
    spawn(disagree, (str(tmp_path),), nprocs=RANKS)
    plans = [torch.load(tmp_path / f"plan-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert plans[0] == plans[1]
