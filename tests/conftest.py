"""Every test starts with a clean compiler, a fixed seed, and measurements kept in a folder of the test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _measurements_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENCORE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
