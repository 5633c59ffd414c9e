"""Which lowerings a test runs in. Kernels take time to compile: `make test` leaves many fused cases to `make test-all`.

A test with an argument `lowering` runs in both, if it does not parametrize the argument itself (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from encore.options import LOWERINGS

both_lowerings = pytest.mark.parametrize("lowering", LOWERINGS)
fused_is_slow = pytest.mark.parametrize("lowering", ["eager", pytest.param("fused", marks=pytest.mark.slow)])


def in_both_lowerings(argument: str, cases: Iterable[Any], fused: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with cases and lowerings, of which `make test` has all in the eager lowering, and those of
    `fused` in the fused one."""
    return pytest.mark.parametrize(
        (argument, "lowering"),
        [
            pytest.param(case, lowering, marks=pytest.mark.slow if lowering == "fused" and case not in fused else ())
            for case in cases
            for lowering in LOWERINGS
        ],
    )
