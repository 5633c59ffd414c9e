"""Workloads as targets of the `encore` command."""

from __future__ import annotations

import json

import pytest

from benchmarks.workloads import NAMED_SIZES, WORKLOADS, targets
from encore.cli import main
from encore.cli.targets import load_target


def test_every_workload_and_every_named_size_is_a_target() -> None:
    names = {name for name, thing in vars(targets).items() if callable(thing) and not name.startswith("_")}
    named = {f"{name}_{size}".replace("-", "_") for name, sizes in NAMED_SIZES.items() for size in sizes}
    assert names == {*WORKLOADS, *(f"{name}_tiny" for name in WORKLOADS), *named}


def test_a_target_is_a_model_with_its_first_batch() -> None:
    model, args, kwargs = load_target("benchmarks.workloads.targets:lm_tiny")
    assert model(*args, **kwargs).ndim == 0


def test_a_workload_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "benchmarks.workloads.targets:lm_tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["floor"] > 0


def test_an_unknown_workload_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "benchmarks.workloads.targets:seq2seq"]) == 1
    message = capsys.readouterr().err
    assert "has no factory 'seq2seq'; it has 'alexnet', 'alexnet_tiny', " in message
