"""The metrics against cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.workloads.metrics import accuracy, bleu, edit_distance, exact_match, label_error_rate, perplexity


def test_bleu_of_a_perfect_translation_is_a_hundred() -> None:
    sentences = [["the", "cat", "sat", "on", "the", "mat"], ["it", "slept"]]
    assert bleu(sentences, sentences) == pytest.approx(100)


def test_bleu_counts_a_word_no_more_often_than_the_reference_has_it() -> None:
    """Papineni's example: two of seven, for there are two "the" in the reference; no pair of words matches."""
    assert bleu([["the"] * 7], [["the", "cat", "is", "on", "the", "mat"]]) == 0.0
    assert bleu([["the"]], [["the"]]) == pytest.approx(100)


def test_bleu_by_hand() -> None:
    """Of "a b c d x": 4/5 words, 3/4 pairs, 2/3 triples and 1/2 fours stand in "a b c d e", which is as long."""
    precision = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert bleu([list("abcdx")], [list("abcde")]) == pytest.approx(100 * precision)


def test_bleu_penalises_what_is_too_short_and_only_that() -> None:
    """All n-grams of four words are right, but two more were wanted: exp(1 - 6/4)."""
    assert bleu([list("abcd")], [list("abcdef")]) == pytest.approx(100 * math.exp(1 - 6 / 4))
    precision = (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** (1 / 4)
    assert bleu([list("abcdefg")], [list("abcdef")]) == pytest.approx(100 * precision)


def test_bleu_is_of_a_corpus_and_not_the_mean_of_sentences() -> None:
    """7 of 8 words, 5 of 6 pairs, 3 of 4 triples, 1 of 2 fours."""
    found = [["a", "b", "c", "d"], ["e", "f", "g", "x"]]
    wanted = [["a", "b", "c", "d"], ["e", "f", "g", "h"]]
    precision = (7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** (1 / 4)
    assert bleu(found, wanted) == pytest.approx(100 * precision)


@pytest.mark.parametrize("found", [[[]], [["x"]], [list("ba")]])
def test_bleu_of_nothing_right_is_zero(found: list[list[str]]) -> None:
    assert bleu(found, [list("ab")]) == 0.0


@pytest.mark.parametrize(
    ("found", "wanted", "edits"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_edit_distance(found: str, wanted: str, edits: int) -> None:
    assert edit_distance(found, wanted) == edits


def test_label_error_rate_is_edits_a_label() -> None:
    assert label_error_rate(["abc", "xy"], ["abd", "x"]) == 2 / 4
    assert label_error_rate(["abcd"], ["x"]) == 4


def test_exact_match_accuracy_and_perplexity() -> None:
    assert exact_match([["a"], ["b", "c"]], [["a"], ["b"]]) == 0.5
    assert accuracy(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1])) == 0.5
    assert perplexity(torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.long)) == pytest.approx(7)
