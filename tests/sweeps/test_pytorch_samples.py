"""PyTorch's own samples of its operators and modules at the lowest budget: eager's numbers in both lowerings.

The databases are in the wheel; importing them takes `expecttest` and seconds, so they are imported only if slow tests
are to run. A part of the sweep: `pytest tests/sweeps -k "eager and linalg"`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from support.pytorch_exceptions import DIFFERENT_BITS, NOTHING, REFUSED
from support.pytorch_samples import Outcome, Sample, databases, module_samples, operator_samples, try_sample

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
SAMPLES = 2
FUSED_EACH = 8
"""One entry in so many is tried in the fused lowering as well, whose kernels take seconds to compile."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "not slow" in metafunc.config.option.markexpr:
        metafunc.parametrize("name", [])
        return
    pytest.importorskip("expecttest")
    operators, modules = map(list, databases())
    fused = list(dict.fromkeys([*DIFFERENT_BITS, *operators[::FUSED_EACH]]))
    names = {
        "test_operators_in_the_eager_lowering": operators,
        "test_modules_in_the_eager_lowering": modules,
        "test_operators_in_the_fused_lowering": fused,
        "test_modules_in_the_fused_lowering": modules[::FUSED_EACH],
    }
    metafunc.parametrize("name", names[metafunc.function.__name__])


def samples_of(info: Any, take: Any) -> list[Sample]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[Sample] = take(info, SAMPLES)
    return found


def check(name: str, outcome: Outcome, lowering: str) -> None:
    assert not outcome.probes, "an operator rejected operands from its domain"
    if lowering == "fused" or name not in DIFFERENT_BITS:
        assert not outcome.wrong
    if outcome.tried and not outcome.planned:
        assert name in REFUSED, outcome.reason
        assert REFUSED[name] in outcome.reason or outcome.reason == NOTHING
    if outcome.measured and not outcome.noted:
        assert outcome.measured <= outcome.predicted


def test_operators_in_the_eager_lowering(name: str) -> None:
    for sample in samples_of(databases()[0][name], operator_samples):
        check(name, try_sample(sample, "eager", measure=True), "eager")


def test_modules_in_the_eager_lowering(name: str) -> None:
    for sample in samples_of(databases()[1][name], module_samples):
        check(name, try_sample(sample, "eager", measure=True), "eager")


def test_operators_in_the_fused_lowering(name: str) -> None:
    for sample in samples_of(databases()[0][name], operator_samples):
        check(name, try_sample(sample, "fused"), "fused")


def test_modules_in_the_fused_lowering(name: str) -> None:
    for sample in samples_of(databases()[1][name], module_samples):
        check(name, try_sample(sample, "fused"), "fused")
