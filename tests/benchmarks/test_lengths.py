"""The suite `lengths`: its workloads, and one of them from end to end."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import lengths, lengths_epoch
from benchmarks.lengths import LengthSuite
from benchmarks.lengths_compared import _out_of_patience_after, _OutOfPatienceError, compare_lengths, drawn_lengths
from benchmarks.lengths_epoch import run_epoch
from benchmarks.lengths_memory import ShapeMemory
from benchmarks.lengths_table import page, render
from benchmarks.workloads.corpus import zipf_corpus
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


def test_lengths_are_drawn_alike_and_differ() -> None:
    for bounds in ((4, 70), (16, 160)):
        lengths = drawn_lengths(bounds, 100)
        assert lengths == drawn_lengths(bounds, 100)
        assert (len(lengths), len(set(lengths))) == (100, 64)
        assert bounds[0] <= min(lengths) <= max(lengths) <= bounds[1]
    assert set(drawn_lengths((3, 5), 8)) == {3, 4, 5}


def test_the_corpus_has_lengths_of_zipfs_law() -> None:
    corpus = zipf_corpus(texts=400, batch_size=4, longest=60)
    lengths = [int((row != 0).sum()) for words, _ in corpus.batches for row in words]
    assert len(lengths) == 400
    assert 6 <= min(lengths) <= max(lengths) <= 60
    assert sum(length < 12 for length in lengths) > 400 / 3  # 2.4 of 4.6, as the harmonic numbers of 6 and 55 are
    words, following = corpus.longest
    assert torch.equal(words[:, 1:], following[:, :-1])
    assert words.shape[1] == max(lengths)
    assert torch.equal(corpus.longest[0], zipf_corpus(texts=400, batch_size=4, longest=60).longest[0])


def test_parts_are_kept_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ShapeMemory(shapes=24, kept=3, before=10, resident=(20,) * 12, after=11)
    ran = list[int]()

    def run(count: int, advance: object) -> ShapeMemory:
        ran.append(count)
        return found

    monkeypatch.setattr(lengths, "run_shapes", run)
    for _ in range(2):
        suite = lengths.run_lengths(quick=True, only=["shapes"], parts=tmp_path)
        assert suite.shapes == found
    assert ran == [24]
    assert not violations(json.loads(suite.to_json()), LengthSuite.schema())
    for text in (render(suite), page(suite)):
        assert "+0.0%" in text
    lengths.run_lengths(only=["shapes"], parts=tmp_path)  # larger than what is kept
    assert ran == [24, 300]


def test_a_part_that_fails_does_not_end_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(count: int, advance: object) -> ShapeMemory:
        raise ValueError("no memory\nto be seen")

    monkeypatch.setattr(lengths, "run_shapes", run)
    suite = lengths.run_lengths(quick=True, only=["shapes"])
    assert suite.failures == {"shapes": "ValueError: no memory"}
    assert "shapes failed: ValueError: no memory" in render(suite)


def test_a_step_that_takes_too_long_is_interrupted() -> None:
    with pytest.raises(_OutOfPatienceError), _out_of_patience_after(0.0):
        threading.Event().wait(600)


@pytest.mark.slow
def test_an_epoch_in_half_of_the_memory() -> None:
    found = run_epoch(lengths_epoch.QUICK)
    assert found.peak <= found.budget == found.eager_peak // 2
    assert found.loss_difference < 1e-4
    assert found.steps == 12
    suite = LengthSuite(this_machine(), quick=True, batches=8, outcomes={}, epoch=found)
    assert not violations(json.loads(suite.to_json()), LengthSuite.schema())
    assert "An epoch in half of the memory" in page(suite)


@pytest.mark.slow
def test_one_workload_of_many_lengths() -> None:
    make = functools.partial(build_lengths, "tagger", batch_size=4, hidden=16)
    found = compare_lengths(make, batches=6, looked_at=2)
    assert found.predicted_kept == found.distinct == 4
    assert found.kept == found.looked_at == 2
    assert -0.001 <= found.least_apart <= found.apart <= 0.02
    assert found.gradient_error < 3
    suite = LengthSuite(this_machine(), quick=True, batches=6, outcomes={"tagger": found})
    assert not violations(json.loads(suite.to_json()), LengthSuite.schema())
    assert "tagger" in render(suite)
    assert "| tagger |" in page(suite)
