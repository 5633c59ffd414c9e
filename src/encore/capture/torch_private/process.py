"""The processes of a distributed run."""

from __future__ import annotations

import torch


def has_ranks() -> bool:
    """Return whether this process is one of several in a distributed run."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size() > 1


def first_value(key: str, mine: str) -> str:
    """In a distributed run, the value that the first rank to call this gave for the key. No rank waits for another."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return store.compare_set(key, "", mine).decode()
