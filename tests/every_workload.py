"""Which workloads a test looks at: five kinds of network in `make test`, every one in `make test-all`."""

from __future__ import annotations

import pytest

from encore.workloads import WORKLOADS

FIVE = ("lm", "nmt", "resnet", "speech", "transformer")

every_workload = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIVE else pytest.mark.slow) for name in sorted(WORKLOADS)]
)
