"""These tests run where the null device is, each with its default settings and an empty cache of the allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from nullcuda.null_device import is_here

collect_ignore_glob = [] if is_here() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "nullcuda" in item.path.parts:
            item.add_marker("nullcuda")


@pytest.fixture(autouse=True)
def _empty_device() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    assert torch.cuda.current_device() == 0
