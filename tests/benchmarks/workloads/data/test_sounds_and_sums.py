"""Utterances of vowels, tapes of sums and English sentences: well formed, and split for good."""

from __future__ import annotations

import itertools

import torch

from benchmarks.workloads.data.sentences import ALPHABET as LETTERS
from benchmarks.workloads.data.sentences import WORDS, characters, sentence, words
from benchmarks.workloads.data.sums import ALPHABET, SUM, tape_of_sums
from benchmarks.workloads.data.vowels import FORMANTS, SHORTEST_VOWEL, utterances


def test_every_vowel_lasts_and_differs_from_its_neighbours() -> None:
    for frames in (4, 5, 7, 32, 101):
        rows = utterances(50, frames, torch.Generator().manual_seed(0)).tolist()
        for row in rows:
            runs = [len(list(run)) for _, run in itertools.groupby(row)]
            assert sum(runs) == frames
            assert min(runs) >= SHORTEST_VOWEL
            assert set(row) <= set(range(len(FORMANTS)))


def sums(*, held_out: bool) -> set[str]:
    codes = tape_of_sums(100, 5 * len(SUM), torch.Generator().manual_seed(0), held_out=held_out)
    tapes = ["".join(ALPHABET[code] for code in row) for row in codes.tolist()]
    return {written for tape in tapes for written in tape.removesuffix(";").split(";")}


def test_sums_are_right_and_held_out_ones_are_never_on_a_tape_to_learn_from() -> None:
    trained, scored = sums(held_out=False), sums(held_out=True)
    assert trained.isdisjoint(scored)
    for written in trained | scored:
        left, right, result = (int(number) for number in written.replace("=", "+").split("+"))
        assert left + right == result
        assert len(written) + 1 == len(SUM)


def test_sentences_to_learn_from_and_to_score_on_are_others() -> None:
    generator = torch.Generator().manual_seed(0)
    trained, scored = (
        {" ".join(sentence(generator, held_out=held_out)) for _ in range(300)} for held_out in (False, True)
    )
    assert trained.isdisjoint(scored)
    assert {word for text in trained | scored for word in text.split()} <= set(WORDS)


def test_text_has_the_length_asked_for_in_characters_or_in_words() -> None:
    generator = torch.Generator().manual_seed(0)
    assert len(text := characters(77, generator, held_out=False)) == 77
    assert set(text) <= set(LETTERS)
    assert len(read := words(33, generator, held_out=False)) == 33
    assert set(read) <= set(WORDS)
