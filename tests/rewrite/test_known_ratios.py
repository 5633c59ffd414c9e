"""Judgements carried over to other sizes of the same products."""

from __future__ import annotations

import pytest
import torch

import encore.rewrite.judge
from encore.rewrite import ConvolutionShape, Judge, KnownRatios


def question(rows: int, columns: int = 64) -> str:
    return f"rewrite stack 8 torch.float32 ({rows}, {columns})({columns}, 1) @ ({columns}, 32)(32, 1) cpu threads=1"


def known(*ratios: tuple[str, float]) -> KnownRatios:
    found = KnownRatios()
    for text, ratio in ratios:
        found.note(text, ratio)
    found.finish()
    return found


def test_the_nearest_sizes_within_the_range_answer() -> None:
    found = known((question(16), 0.5), (question(48), 0.8))
    assert found.near(question(17)) == 0.5
    assert found.near(question(40)) == 0.8
    assert found.near(question(192)) == 0.8
    assert found.near(question(193)) is None
    assert found.near(question(16, columns=300)) is None


@pytest.mark.parametrize(("old", "new"), [("float32", "float64"), ("stack", "merge"), ("threads=1", "threads=2")])
def test_other_questions_are_not_answered(old: str, new: str) -> None:
    assert known((question(16), 0.5)).near(question(16).replace(old, new)) is None


def test_a_graph_does_not_answer_its_own_questions() -> None:
    found = KnownRatios()
    found.note(question(16), 0.5)
    assert found.near(question(17)) is None
    found.finish()
    assert found.near(question(17)) == 0.5


def test_what_is_carried_over_is_remembered_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ratio(before: object, after: object) -> float:
        asked.append(before)
        return 0.25

    monkeypatch.setattr(encore.rewrite.judge, "_ratio", ratio)

    def shape(rows: int) -> ConvolutionShape:
        return ConvolutionShape((rows, 8, 16, 16), (8, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float32)

    ratios = KnownRatios()
    first = Judge(run=True, known=ratios)
    assert first.channels_last_pays([shape(4)])
    ratios.finish()
    assert Judge(run=True, known=ratios).channels_last_pays([shape(6)])
    assert len(asked) == 1
    assert Judge(run=False).channels_last_pays([shape(6)]), "known without a measurement, and without other sizes"
    assert Judge(run=True, known=ratios).channels_last_pays([shape(64)])
    assert len(asked) == 2
