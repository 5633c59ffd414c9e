"""Sentences in two languages, to translate from one to the other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from benchmarks.workloads.data import diary as diaries
from benchmarks.workloads.data import numerals
from benchmarks.workloads.data.split import draw
from benchmarks.workloads.data.vocabulary import Vocabulary
from encore.errors import OptionError

Pair: TypeAlias = tuple[list[str], list[str]]
"""A sentence and its translation, as words."""


@dataclass(frozen=True)
class ParallelText:
    """Two vocabularies and a source of pairs; every pair fits the number of steps it was asked for."""

    source: Vocabulary
    target: Vocabulary
    pair: Callable[[torch.Generator, bool], Pair]
    """A random pair; the flag says whether it is one of those held out, which are never trained on."""


def source_text(pair: Pair) -> str:
    return " ".join(pair[0])


def numbers(steps: int) -> ParallelText:
    """Written-out numbers, English to German, with as many groups of three digits as fit."""
    most_groups = min(steps // numerals.LONGEST_GROUP, numerals.MOST_GROUPS)
    if most_groups < 1:
        raise OptionError(f"steps={steps} is too short for a written-out number: {numerals.LONGEST_GROUP} at least")
    return grammar(numerals.ENGLISH, numerals.GERMAN, partial(numerals.random_pair, most_groups))


def diary(steps: int) -> ParallelText:
    """Diary entries with dates and numbers, English to German, as many one after another as fit."""
    most_entries = (steps - 1) // diaries.LONGEST_ENTRY  # a step is for the end
    if most_entries < 1:
        raise OptionError(f"steps={steps} is too short for a diary entry: {diaries.LONGEST_ENTRY + 1} at least")
    return grammar(diaries.ENGLISH, diaries.GERMAN, partial(diaries.random_entries, most_entries))


def grammar(source: list[str], target: list[str], make: Callable[[torch.Generator], Pair]) -> ParallelText:
    """Parallel text that `make` generates from these words."""

    def pair(generator: torch.Generator, held_out: bool) -> Pair:
        return draw(make, source_text, generator, held_out=held_out)

    return ParallelText(Vocabulary(source), Vocabulary(target), pair)


TASKS: dict[str, Callable[[int], ParallelText]] = {"diary": diary, "numbers": numbers}
"""Makers of parallel text by name; each takes the number of steps that a sentence may have, its end included."""
