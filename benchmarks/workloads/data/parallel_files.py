"""A user's own parallel text: two files with a sentence a line, words set apart by spaces, translated line by line."""

import warnings
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.workloads.data.parallel import Pair, ParallelText
from benchmarks.workloads.data.split import ONE_IN
from benchmarks.workloads.data.vocabulary import MARKERS, UNKNOWN, Vocabulary
from encore.errors import OptionError


def parallel_files(source: str, target: str, steps: int, vocabulary: int) -> ParallelText:
    """Pairs from two files, with the `vocabulary` most frequent words of each that are trained on.

    A tenth of the sentences is held out, whichever lines they stand on. Pairs that do not fit `steps` are left out,
    with a warning; pairs of which a side is blank are no pairs.
    """
    pairs = [pair for pair in zip(*_sides(source, target), strict=True) if all(pair)]
    fitting = [pair for pair in pairs if max(len(pair[0]), len(pair[1]) + 1) <= steps]
    if left_out := len(pairs) - len(fitting):
        needed = max(max(len(read), len(written) + 1) for read, written in pairs)
        warnings.warn(
            f"{left_out} of {len(pairs)} sentences have more than steps={steps} words and are left out; "
            f"steps={needed} would take all",
            stacklevel=2,
        )
    train, held_out = _split(fitting, source, steps)
    sides = {False: train, True: held_out}

    def pair(generator: torch.Generator, held_out: bool) -> Pair:
        side = sides[held_out]
        return side[int(torch.randint(len(side), (), generator=generator))]

    return ParallelText(
        _vocabulary((read for read, _ in train), vocabulary),
        _vocabulary((written for _, written in train), vocabulary),
        pair,
    )


def _sides(source: str, target: str) -> list[list[list[str]]]:
    sides = [_lines(path) for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise OptionError(
            f"{source} has {len(sides[0])} lines and {target} has {len(sides[1])}: line n of one must be the "
            "translation of line n of the other"
        )
    return sides


def _lines(path: str) -> list[list[str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"cannot be read ({error.strerror})"
        raise OptionError(f"{path} {why}; give a text file with a sentence on each line") from error
    if not text.strip():
        raise OptionError(f"{path} is empty; give a text file with a sentence on each line")
    return [line.split() for line in text.removesuffix("\n").split("\n")]


def _split(pairs: list[Pair], source: str, steps: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and pairs to score on; all translations of one sentence are on one side."""
    sentences = sorted({" ".join(read) for read, _ in pairs}, key=lambda text: (zlib.crc32(text.encode()), text))
    if len(sentences) < 2:
        raise OptionError(
            f"{source} has {len(sentences)} different sentences of at most steps={steps} words; two are needed at "
            "least, one to train on and one to score on: add sentences, or raise steps"
        )
    held_out = set(sentences[: max(1, len(sentences) // ONE_IN)])
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs:
        sides[" ".join(pair[0]) in held_out].append(pair)
    return sides


def _vocabulary(sentences: Iterable[list[str]], most: int) -> Vocabulary:
    """The most frequent words, ties in alphabetical order; every other word is unknown."""
    counts = Counter(word for sentence in sentences for word in sentence)
    words = sorted(counts.keys() - {*MARKERS, UNKNOWN}, key=lambda word: (-counts[word], word))
    return Vocabulary([UNKNOWN, *words[:most]])
