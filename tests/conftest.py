"""Every test starts with a clean compiler, a fixed seed, and measurements and kernels kept in a folder of the run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_run() -> Iterator[None]:
    # pytest's own temporary folders outlive three runs, and the compiled headers in this one are large.
    with tempfile.TemporaryDirectory(prefix="encore-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENCORE_CACHE_DIR", folder)
        yield


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(params=["eager", "fused"])
def lowering(request: pytest.FixtureRequest) -> str:
    """The test runs in each lowering."""
    return str(request.param)
