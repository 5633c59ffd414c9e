"""Every test starts with a clean compiler, a fixed seed, and measurements and kernels kept in a folder of the run."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

CACHE = "ENCORE_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """One cache for the run, made by the process that was started and inherited by its workers.

    pytest's own temporary folders outlive three runs, and the compiled headers in this one are large.
    """
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="encore-tests-")
        before = os.environ.get(CACHE)
        os.environ[CACHE] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.update({CACHE: before or ""}))
    else:
        torch.set_num_threads(1)  # a core each


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A deep network with many kernels takes half a minute to compile: in `make test`, only the promises look at it."""
    for item in items:
        if "fused-resnet" in item.nodeid and "test_promises" not in item.nodeid:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(params=["eager", "fused"])
def lowering(request: pytest.FixtureRequest) -> str:
    """The test runs in each lowering."""
    return str(request.param)
