"""A small Transformer, sharded by FSDP2 in the ways that people do, in processes on gloo."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import encore

WIDTH, HEADS, BLOCKS, LENGTH, WORDS, BATCH = 64, 4, 4, 64, 128, 8


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.between(x))))


class LanguageModel(nn.Module):
    """Blocks between an embedding and a head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


def sharded(model: LanguageModel, **options: Any) -> LanguageModel:
    """The same model, its blocks and then the rest sharded in place."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def arranged(arrangement: str, options: dict[str, Any], **sharding: Any) -> LanguageModel:
    """A model with fixed numbers that is sharded, and compiled in one of the ways there are."""
    torch.manual_seed(0)
    model = LanguageModel()
    if arrangement == "blocks":
        for block in model.blocks:
            encore.compile(block, **options)
        return sharded(model, **sharding)
    if arrangement == "before":
        return sharded(encore.compile(model, **options), **sharding)
    if arrangement == "after":
        return encore.compile(sharded(model, **sharding), **options)
    return sharded(model, **sharding) if arrangement == "plain" else model


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all ranks' shards, put together."""
    return {name: one.grad.full_tensor().clone() for name, one in model.named_parameters()}  # type: ignore[union-attr]


def run_ranks(work: Callable[[int], Any], folder: Path, *, ranks: int = 2, backend: str = "gloo") -> list[Any]:
    """What each of some processes saved, by rank."""
    paths = [
        str(Path(__file__).parents[1]),
        *(str(one) for one in (Path(__file__).parents[1]).iterdir() if one.is_dir()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
        mp.spawn(_begin, (work, str(folder), ranks, backend), nprocs=ranks, join=True)  # type: ignore[attr-defined]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _begin(rank: int, work: Callable[[int], Any], folder: str, ranks: int, backend: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)
    if backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    else:
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    try:
        torch.save(work(rank), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
