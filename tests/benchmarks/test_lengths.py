"""The suite `lengths`: its workloads, and one of them from end to end."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from benchmarks.lengths import LengthSuite
from benchmarks.lengths_compared import compare_lengths
from benchmarks.lengths_table import page, render
from benchmarks.workloads.lengths import LENGTH_WORKLOADS, build_lengths
from encore.errors import OptionError
from encore.machine import this_machine
from support.json_schema import violations


@pytest.mark.parametrize("name", sorted(LENGTH_WORKLOADS))
def test_a_length_has_one_batch(name: str) -> None:
    if name in ("bert", "llama", "t5"):
        pytest.importorskip("transformers")
    workload = build_lengths(name)
    shortest, longest = workload.lengths
    shapes = set()
    for length in (shortest, longest):
        one, other = workload.batch(length), workload.batch(length)
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))
        shapes.add(one[0].shape)
    assert len(shapes) == 2


def test_an_unknown_name() -> None:
    with pytest.raises(OptionError, match="no workload of many lengths is called 'gru'"):
        build_lengths("gru")


@pytest.mark.slow
def test_one_workload_of_many_lengths() -> None:
    make = functools.partial(build_lengths, "tagger", batch_size=4, hidden=16)
    found = compare_lengths(make, batches=6, looked_at=2)
    assert found.kept == found.looked_at == 2
    assert -0.001 <= found.least_apart <= found.apart <= 0.02
    assert found.gradient_error < 3
    suite = LengthSuite(this_machine(), quick=True, batches=6, outcomes={"tagger": found})
    assert not violations(json.loads(suite.to_json()), LengthSuite.schema())
    assert "tagger" in render(suite)
    assert "| tagger |" in page(suite)
