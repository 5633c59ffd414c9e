"""Translation from files of the user's: what is read, what is held out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.workloads import build
from benchmarks.workloads.data.numerals import english, german
from benchmarks.workloads.data.parallel_files import parallel_files
from benchmarks.workloads.data.vocabulary import UNKNOWN
from encore.errors import OptionError


def written(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def numbers(folder: Path, count: int = 100) -> tuple[str, str]:
    sides = ("en", english), ("de", german)
    made = [
        written(folder, name, "".join(" ".join(spelt([n])) + "\n" for n in range(1, count + 1)))
        for name, spelt in sides
    ]
    return made[0], made[1]


def test_files_are_trained_on_and_scored(tmp_path: Path) -> None:
    source, target = numbers(tmp_path)
    workload = build("nmt", size="tiny", source=source, target=target)
    again = build("nmt", size="tiny", source=source, target=target)
    assert workload.model(*workload.batch(0)).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(workload.batch(3), again.batch(3), strict=True))
    assert workload.score(workload.model).keys() == {"exact match", "BLEU"}
    assert workload.sample is not None
    assert "source:" in workload.sample(workload.model)


def test_a_tenth_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    text = parallel_files(*numbers(tmp_path), steps=6, vocabulary=100)
    generator = torch.Generator().manual_seed(0)
    trained, scored = ({" ".join(text.pair(generator, held)[0]) for _ in range(2_000)} for held in (False, True))
    assert (len(trained), len(scored)) == (90, 10)
    assert trained.isdisjoint(scored)


def test_lines_stay_together(tmp_path: Path) -> None:
    text = parallel_files(*numbers(tmp_path), steps=6, vocabulary=100)
    generator = torch.Generator().manual_seed(0)
    expected = {" ".join(english([n])): german([n]) for n in range(1, 101)}
    for _ in range(50):
        read, put = text.pair(generator, False)
        assert expected[" ".join(read)] == put


def test_rare_words_are_unknown(tmp_path: Path) -> None:
    lines = "a b\na c\na b d\nb a\n" * 3
    source, target = (written(tmp_path, name, lines) for name in ("source", "target"))
    text = parallel_files(source, target, steps=6, vocabulary=2)
    assert set(text.source.words[4:]) == {"a", "b"}
    assert text.source.words[3] == UNKNOWN
    assert text.source.decode(text.source.encode(["a", "zebra", "b"])) == ["a", UNKNOWN, "b"]


def test_blank_lines_are_no_sentences_and_shift_nothing(tmp_path: Path) -> None:
    source = written(tmp_path, "source", "a\n\nb\nc\n")
    target = written(tmp_path, "target", "x\nnothing\ny\nz")
    text = parallel_files(source, target, steps=4, vocabulary=10)
    generator = torch.Generator().manual_seed(0)
    pairs = {(*read, *put) for held in (False, True) for _ in range(20) for read, put in [text.pair(generator, held)]}
    assert pairs == {("a", "x"), ("b", "y"), ("c", "z")}


def test_sentences_that_do_not_fit_are_left_out_with_a_warning(tmp_path: Path) -> None:
    source, target = (written(tmp_path, name, "a\nb\nc d e f g\n") for name in ("source", "target"))
    with pytest.warns(UserWarning, match=r"1 of 3 sentences have more than steps=4 words.*steps=6 would take all"):
        parallel_files(source, target, steps=4, vocabulary=10)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("a\nb\nc\n", "x\ny\n", r"source has 3 lines and .*target has 2: line n of one must be the translation"),
        ("", "x\n", r"source is empty; give a text file with a sentence on each line"),
        ("\n\n", "x\ny\n", r"source is empty"),
        (b"\xff\xfe\x00", "x\n", r"source is not UTF-8 text"),
        ("a\na\n", "x\ny\n", r"source has 1 different sentences .*two are needed at least"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, source: str | bytes, target: str, message: str) -> None:
    paths = written(tmp_path, "source", source), written(tmp_path, "target", target)
    with pytest.raises(OptionError, match=message):
        build("nmt", size="tiny", source=paths[0], target=paths[1])


def test_missing_files_and_missing_sides_are_refused(tmp_path: Path) -> None:
    there = written(tmp_path, "there", "a\nb\n")
    with pytest.raises(OptionError, match=r"nowhere cannot be read \(No such file or directory\)"):
        build("nmt", source=str(tmp_path / "nowhere"), target=there)
    with pytest.raises(OptionError, match="cannot be read"):
        build("nmt", source=str(tmp_path), target=there)
    with pytest.raises(OptionError, match="give both source= and target=, or neither"):
        build("nmt", source=there)
