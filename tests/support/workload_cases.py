"""The workloads of a test: five kinds of network in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from benchmarks.workloads import WORKLOADS
from encore.options import LOWERINGS

FIVE = ("lm", "nmt", "resnet", "speech", "transformer")


def workloads(*quick: str) -> pytest.MarkDecorator:
    """Every workload; all but these are slow."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in sorted(WORKLOADS)]
    )


def workloads_lowered(eager: Collection[str], fused: Collection[str]) -> pytest.MarkDecorator:
    """Every workload in both lowerings; all but these are slow. Deep or long networks take half a minute to compile."""
    quick = {"eager": eager, "fused": fused}
    return pytest.mark.parametrize(
        ("lowering", "name"),
        [
            pytest.param(lowering, name, marks=() if name in quick[lowering] else pytest.mark.slow)
            for lowering in LOWERINGS
            for name in sorted(WORKLOADS)
        ],
    )


every_workload = workloads(*FIVE)
