"""Every test starts with a clean compiler, a fixed seed, and measurements and kernels kept in a folder of the run."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from browsing import start_browser
from encore.rnn import tuning

CACHE = "ENCORE_CACHE_DIR"
KEPT_CACHE = "ENCORE_TEST_CACHE_DIR"
"""Names a cache that is kept between runs: kernels are compiled once. `make test` starts with an empty one."""
CAPTURED_ALIKE = (
    "autocast", "autograd", "breaks_and_shapes", "modules", "random", "recurrent", "state", "transparency", "writes"
)  # fmt: skip
"""Tests of capturing whose fused form adds little to its eager one."""
LEFT_TO_ALL = (
    r"test_captured_graphs_are_legal\[(eager-(lm|nmt|resnet)|fused-)",
    r"tests/schedule/.*\[(eager-nmt|eager-resnet|fused-lm)\]",
    r"test_promises.py::test_a_fused_step.*\[resnet\]",
    r"test_promises.py::.*\[fused-resnet\]",
    r"test_budgets_are_kept_with_the_same_gradients\[lm\]",
    r"test_a_fused_step_at_the_floor_is_legal_predicted_and_close_to_eager\[lm\]",
    r"test_codecs_that_lose_something_are_used_only_where_they_may_be_and_told\[fused\]",
    r"test_the_judge_measures_once",
    r"test_attention_bench.py::test_rows",
    r"test_the_peak_does_not_grow_with_the_length\[tiers1\]",
    r"test_a_saved_plan_moves_the_same_values\[fused\]",
)
"""The slowest of tests that have a sister: ten seconds and more each."""


def pytest_configure(config: pytest.Config) -> None:
    """One cache for the run, made by the process that was started and inherited by its workers.

    pytest's own temporary folders outlive three runs, and the compiled headers in this one are large.
    """
    if not hasattr(config, "workerinput"):
        before = os.environ.get(CACHE)
        os.environ[CACHE] = os.environ.get(KEPT_CACHE) or _temporary_folder(config)
        config.add_cleanup(lambda: os.environ.update({CACHE: before or ""}))
    else:
        torch.set_num_threads(1)  # a core each


def _temporary_folder(config: pytest.Config) -> str:
    folder = tempfile.TemporaryDirectory(prefix="encore-tests-")
    config.add_cleanup(folder.cleanup)
    return folder.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In `make test`, deep or long networks, which take half a minute to compile, are left to the promises; and most of
    what capturing is asked runs in the eager lowering alone: kernels are the same whatever was captured."""
    for item in items:
        name, lowered = item.nodeid, "fused" in item.nodeid.partition("[")[2]
        large = any(network in name for network in ("fused-resnet", "fused-nmt", "fused-transformer"))
        captured = lowered and any(f"capture/test_{file}.py" in name for file in CAPTURED_ALIKE)
        if (large and "test_promises" not in name) or captured or any(re.search(part, name) for part in LEFT_TO_ALL):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _our_own_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests use small layers, which `encore.nn.LSTM` would leave to `torch.nn`."""
    monkeypatch.setattr(tuning, "FEW", -1)
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser, where there is one."""
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(params=["eager", "fused"])
def lowering(request: pytest.FixtureRequest) -> str:
    """The test runs in each lowering."""
    return str(request.param)
