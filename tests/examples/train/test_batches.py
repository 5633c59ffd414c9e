"""The largest batch: found exactly, with few questions, and both sides run within the budget."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import TINY_SIZES, tiny
from encore.batch_size import largest_within
from examples.train.command import main
from examples.train.search import batch_shapes
from examples.train.settings import Settings


@given(
    steps=st.lists(st.integers(1, 50), min_size=1, max_size=200),
    start=st.integers(0, 500),
    limit=st.integers(0, 6000),
    most=st.integers(1, 200),
)
def test_the_largest_size_of_any_growing_total(steps: list[int], start: int, limit: int, most: int) -> None:
    def total(size: int) -> int:
        assert 1 <= size <= most
        return start + sum(steps[:size]) + max(0, size - len(steps))

    fitting = [size for size in range(1, most + 1) if total(size) <= limit]
    assert largest_within(limit, total, most) == max(fitting, default=0)


@pytest.mark.parametrize("slope", [1, 7, 1000])
@pytest.mark.parametrize("wanted", [1, 2, 37, 511, 512, 123_457])
def test_few_questions_where_memory_is_affine(slope: int, wanted: int) -> None:
    asked = set()

    def total(size: int) -> int:
        asked.add(size)
        return 5000 + slope * size

    assert largest_within(5000 + slope * wanted + slope // 2, total) == wanted
    assert len(asked) <= 6


@pytest.mark.parametrize("name", ["deepspeech2", "lm", "nmt", "resnet", "transformer"])
def test_shapes_of_batches_that_are_never_made(name: str) -> None:
    shapes = batch_shapes(Settings(name, dict(TINY_SIZES[name])))
    real = tiny(name).batch(0)
    made = shapes(TINY_SIZES[name]["batch_size"])
    assert [(tensor.shape, tensor.dtype) for tensor in made] == [(tensor.shape, tensor.dtype) for tensor in real]
    assert all(tensor.is_meta for tensor in made)


TINY = ["--size", "hidden=16", "--size", "layers=1", "--size", "heads=2", "--size", "steps=12"]


@pytest.mark.slow
def test_both_sides_train_within_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    budget = 300_000
    command = ["transformer", *TINY, "--largest-batch", "--budget", str(budget), "--lowering", "eager"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plain, planned = found["plain"], found["planned"]
    assert planned["batch_size"] > plain["batch_size"] >= 1
    assert max(plain["measured"], planned["measured"], planned["predicted"]) <= budget
    a_row = plain["measured"] // plain["batch_size"]
    assert plain["measured"] + a_row > budget, "one more would have fitted"
    assert found["speedup"] > 0
    assert planned["examples_per_second"] == planned["batch_size"] / planned["step_seconds"]


def test_a_budget_that_holds_no_batch_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transformer", "--size", "tiny", *TINY, "--largest-batch", "--budget", "20KB"]) == 2
    assert "encore: a budget of 20000 bytes" in capsys.readouterr().err
