"""Every test starts with a clean compiler, a fixed seed, fixed times, and kernels kept in a folder of the run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from encore.cost.observation import Observation
from encore.rnn import tuning
from support.browser import start_browser
from support.fixed_times import FixedTimes

CACHE = "ENCORE_CACHE_DIR"
KEPT_CACHE = "ENCORE_TEST_CACHE_DIR"
"""Names a cache that is kept between runs: kernels are compiled once. `make test` starts with an empty one."""


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
    fixed_times.turn_on()  # for fixtures of whole modules, too


def _temporary_folder(config: pytest.Config) -> str:
    folder = tempfile.TemporaryDirectory(prefix="encore-tests-")
    config.add_cleanup(folder.cleanup)
    return folder.name


fixed_times = FixedTimes()


@pytest.fixture(autouse=True)
def _times(request: pytest.FixtureRequest) -> Iterator[None]:
    """As fixed as seeds are, unless the test is marked `measured_times`."""
    if request.node.get_closest_marker("measured_times"):
        fixed_times.turn_off()
    yield
    fixed_times.turn_on()


@pytest.fixture(autouse=True)
def _clean_start() -> None:
    Observation.end_running()  # of a step of another test
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def own_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers of every size run on Encore's operators; by default, `encore.nn.LSTM` leaves small ones to `torch.nn`."""
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `lowering` runs in both, if it does not parametrize the argument itself (`lowerings.py`).
    In modules marked `mostly_eager` the fused case is slow: kernels are the same whatever was captured."""
    named = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "lowering" in metafunc.fixturenames and not any("lowering" in names for names in named):
        marks = pytest.mark.slow if metafunc.definition.get_closest_marker("mostly_eager") else ()
        metafunc.parametrize("lowering", ["eager", pytest.param("fused", marks=marks)])
