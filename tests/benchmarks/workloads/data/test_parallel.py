"""Grammars in two languages: every sentence has one translation, and what is scored on was never trained on."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.workloads import build
from benchmarks.workloads.data import diary
from benchmarks.workloads.data.numerals import ENGLISH, GERMAN, LONGEST_GROUP, english, german
from benchmarks.workloads.data.parallel import TASKS, source_text
from benchmarks.workloads.data.split import is_held_out
from benchmarks.workloads.data.vocabulary import PAD
from encore.errors import OptionError

STEPS = {"diary": 60, "numbers": 12}
every_task = pytest.mark.parametrize("task", sorted(TASKS))


@pytest.mark.parametrize(
    ("groups", "in_english", "in_german"),
    [
        ([1], "one", "eins"),
        ([21], "twenty one", "ein und zwanzig"),
        ([316], "three hundred sixteen", "drei hundert sechzehn"),
        ([1, 1], "one thousand one", "ein tausend eins"),
        ([1, 0, 60], "one million sixty", "eine Million sechzig"),
        ([2, 0, 0, 0], "two billion", "zwei Milliarden"),
    ],
)
def test_numbers_are_spelt_in_both_languages(groups: list[int], in_english: str, in_german: str) -> None:
    assert " ".join(english(groups)) == in_english
    assert " ".join(german(groups)) == in_german


def test_every_number_fits_its_steps_and_its_vocabulary() -> None:
    for value in range(1, 1000):
        groups = [value] * 6
        assert set(english(groups)) <= set(ENGLISH)
        assert set(german(groups)) <= set(GERMAN)
        assert max(len(english(groups)), len(german(groups))) < LONGEST_GROUP * len(groups)


def test_no_two_numbers_are_spelt_alike() -> None:
    numbers = [[value] for value in range(1, 1000)]
    numbers += [[value, rest] for value in range(1, 1000, 7) for rest in range(0, 1000, 9)]
    numbers += [[value, rest, 0] for value in (1, 2, 21) for rest in range(0, 1000, 11)]
    for spelt in (english, german):
        assert len({" ".join(spelt(number)) for number in numbers}) == len(numbers)


@pytest.mark.parametrize(
    ("day", "in_english", "in_german"),
    [
        (1, "first", "ersten"),
        (12, "twelfth", "zwölften"),
        (20, "twentieth", "zwanzigsten"),
        (21, "twenty first", "ein und zwanzigsten"),
        (30, "thirtieth", "dreißigsten"),
        (31, "thirty first", "ein und dreißigsten"),
    ],
)
def test_days_are_spelt_in_both_languages(day: int, in_english: str, in_german: str) -> None:
    assert tuple(map(" ".join, diary.ordinal(day))) == (in_english, in_german)


@pytest.mark.parametrize(
    ("year", "in_english", "in_german"),
    [
        (1900, "nineteen hundred", "neunzehn hundert"),
        (1801, "eighteen hundred one", "achtzehn hundert eins"),
        (1984, "nineteen hundred eighty four", "neunzehn hundert vier und achtzig"),
    ],
)
def test_years_are_spelt_in_both_languages(year: int, in_english: str, in_german: str) -> None:
    assert tuple(map(" ".join, diary.year(year))) == (in_english, in_german)


def test_an_entry_of_the_diary_reads_like_this() -> None:
    read, written = diary.entry(torch.Generator().manual_seed(3))
    assert " ".join(read) == (
        "on monday the sixth of april nineteen hundred twenty five "
        "the farmer bought six thousand two hundred ninety six apples ."
    )
    assert " ".join(written) == (
        "am Montag dem sechsten April neunzehn hundert fünf und zwanzig "
        "hat der Bauer sechs tausend zwei hundert sechs und neunzig Äpfel gekauft ."
    )


def test_no_entry_is_longer_than_the_longest() -> None:
    generator = torch.Generator().manual_seed(0)
    longest = max(max(map(len, diary.entry(generator))) for _ in range(3_000))
    assert longest == diary.LONGEST_ENTRY


@every_task
def test_every_sentence_has_one_translation_and_no_two_have_the_same(task: str) -> None:
    text, generator = TASKS[task](STEPS[task]), torch.Generator().manual_seed(0)
    pairs = [text.pair(generator, held_out) for held_out in (False, True) for _ in range(500)]
    translation: dict[str, str] = {}
    source: dict[str, str] = {}
    for read, written in pairs:
        assert translation.setdefault(" ".join(read), " ".join(written)) == " ".join(written)
        assert source.setdefault(" ".join(written), " ".join(read)) == " ".join(read)
        assert set(read) <= set(text.source.words)
        assert set(written) <= set(text.target.words)
        assert len(read) <= STEPS[task] > len(written)
    assert len(translation) > 800


@every_task
def test_held_out_sentences_are_never_trained_on(task: str) -> None:
    text, generator = TASKS[task](STEPS[task]), torch.Generator().manual_seed(0)
    trained, scored = ({source_text(text.pair(generator, held)) for _ in range(400)} for held in (False, True))
    assert trained.isdisjoint(scored)
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, scored))


def test_a_batch_has_no_sentence_that_is_held_out() -> None:
    workload = build("nmt", size="tiny", batch_size=64)
    words = TASKS["numbers"](6).source.words
    for index in range(5):
        for row in workload.batch(index)[0].tolist():
            assert not is_held_out(" ".join(words[code] for code in row if code != PAD))


def test_about_a_tenth_is_held_out() -> None:
    share = sum(is_held_out(" ".join(english([value]))) for value in range(1, 1000)) / 999
    assert share == pytest.approx(0.1, abs=0.03)


def test_longer_texts_have_more_entries() -> None:
    text, generator = TASKS["diary"](100), torch.Generator().manual_seed(0)
    assert {text.pair(generator, False)[0].count(".") for _ in range(40)} == {1, 2, 3}


@pytest.mark.parametrize(("task", "steps"), [("numbers", 5), ("diary", 25)])
def test_too_few_steps_are_refused(task: str, steps: int) -> None:
    with pytest.raises(OptionError, match=rf"steps={steps} is too short .*: {steps + 1} at least"):
        build("nmt", task=task, steps=steps)
    build("nmt", size="tiny", task=task, steps=steps + 1).batch(0)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="'poems'; known tasks: 'diary', 'numbers'"):
        build("nmt", task="poems")


@pytest.mark.parametrize(("layers", "decoder_layers"), [*itertools.product((1, 4), (1, 2, 4))])
def test_either_side_may_have_one_to_four_layers(layers: int, decoder_layers: int) -> None:
    workload = build("nmt", size="tiny", hidden=8, layers=layers, decoder_layers=decoder_layers)
    model = workload.model
    assert len(model.encoder.cells) == layers  # type: ignore[union-attr, arg-type]
    assert len(model.decoder.cells) == decoder_layers  # type: ignore[union-attr, arg-type]
    model(*workload.batch(0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "count"), [("layers", 0), ("layers", 5), ("decoder_layers", 5)])
def test_other_numbers_of_layers_are_refused(name: str, count: int) -> None:
    with pytest.raises(OptionError, match=f"{name}={count} is out of range: 1 to 4"):
        build("nmt", **{name: count})
