"""Entries of a diary in English and in German: a date, somebody, what they did, and how many there were.

    on friday the twenty first of march nineteen hundred eighty four anna counted two hundred three birds .
    am Freitag dem ein und zwanzigsten März neunzehn hundert vier und achtzig hat Anna zwei hundert drei Vögel gezählt .

The day is in the dative and its units come before its tens, the verb comes second and its participle last: words that
stand side by side in one language stand far apart in the other. Every entry has exactly one translation, and no two
have the same.
"""

import datetime
from collections.abc import Sequence
from typing import TypeVar

import torch

from benchmarks.workloads.data import numerals
from benchmarks.workloads.data.numerals import ENGLISH_TENS, GERMAN_SMALL, english, german

Item = TypeVar("Item")

WEEKDAYS = (
    ("monday", "Montag"),
    ("tuesday", "Dienstag"),
    ("wednesday", "Mittwoch"),
    ("thursday", "Donnerstag"),
    ("friday", "Freitag"),
    ("saturday", "Samstag"),
    ("sunday", "Sonntag"),
)
MONTHS = (
    ("january", "Januar"),
    ("february", "Februar"),
    ("march", "März"),
    ("april", "April"),
    ("may", "Mai"),
    ("june", "Juni"),
    ("july", "Juli"),
    ("august", "August"),
    ("september", "September"),
    ("october", "Oktober"),
    ("november", "November"),
    ("december", "Dezember"),
)
ORDINALS = (
    ("first", "ersten"),
    ("second", "zweiten"),
    ("third", "dritten"),
    ("fourth", "vierten"),
    ("fifth", "fünften"),
    ("sixth", "sechsten"),
    ("seventh", "siebten"),
    ("eighth", "achten"),
    ("ninth", "neunten"),
    ("tenth", "zehnten"),
    ("eleventh", "elften"),
    ("twelfth", "zwölften"),
    ("thirteenth", "dreizehnten"),
    ("fourteenth", "vierzehnten"),
    ("fifteenth", "fünfzehnten"),
    ("sixteenth", "sechzehnten"),
    ("seventeenth", "siebzehnten"),
    ("eighteenth", "achtzehnten"),
    ("nineteenth", "neunzehnten"),
)
"""Of the days up to the nineteenth, in German in the dative."""
ROUND_ORDINALS = {20: ("twentieth", "zwanzigsten"), 30: ("thirtieth", "dreißigsten")}
SUBJECTS = (
    ("anna", "hat Anna"),
    ("otto", "hat Otto"),
    ("the farmer", "hat der Bauer"),
    ("the neighbour", "hat die Nachbarin"),
    ("the children", "haben die Kinder"),
    ("we", "haben wir"),
)
"""In German with the auxiliary that agrees with them and, behind a date, stands before them."""
VERBS = (
    ("counted", "gezählt"),
    ("bought", "gekauft"),
    ("sold", "verkauft"),
    ("found", "gefunden"),
    ("saw", "gesehen"),
    ("drew", "gezeichnet"),
)
OBJECTS = (
    ("birds", "Vögel"),
    ("horses", "Pferde"),
    ("books", "Bücher"),
    ("apples", "Äpfel"),
    ("letters", "Briefe"),
    ("trees", "Bäume"),
)

FIRST_YEAR, LAST_YEAR = 1801, 1999
MOST_THINGS = 9_999
LONGEST_ENTRY = 25
"""Words of a German entry in which everything is as long as it gets."""


def _words(side: int) -> list[str]:
    tables = (WEEKDAYS, MONTHS, ORDINALS, tuple(ROUND_ORDINALS.values()), SUBJECTS, VERBS, OBJECTS)
    return sorted({word for table in tables for entry in table for word in entry[side].split()})


ENGLISH = [*numerals.ENGLISH, "on", "the", "of", ".", *(word for word in _words(0) if word != "the")]
GERMAN = [*numerals.GERMAN, "am", "dem", ".", *_words(1)]


def ordinal(day: int) -> tuple[list[str], list[str]]:
    """A day of the month in both languages, as it stands in a date."""
    if day < 20:
        one, other = ORDINALS[day - 1]
        return [one], [other]
    round_english, round_german = ROUND_ORDINALS[day // 10 * 10]
    if day % 10 == 0:
        return [round_english], [round_german]
    return [ENGLISH_TENS[day // 10], ORDINALS[day % 10 - 1][0]], [GERMAN_SMALL[day % 10], "und", round_german]


def year(number: int) -> tuple[list[str], list[str]]:
    """A year in hundreds, as years are read: nineteen hundred eighty four, neunzehn hundert vier und achtzig."""
    hundreds, rest = divmod(number, 100)
    since = ([], []) if rest == 0 else (english([rest]), german([rest]))
    return [*english([hundreds]), "hundred", *since[0]], [*german([hundreds]), "hundert", *since[1]]


def entry(generator: torch.Generator) -> tuple[list[str], list[str]]:
    """A random entry in both languages."""

    def choose(items: Sequence[Item]) -> Item:
        return items[int(torch.randint(len(items), (), generator=generator))]

    first, last = datetime.date(FIRST_YEAR, 1, 1).toordinal(), datetime.date(LAST_YEAR, 12, 31).toordinal()
    date = datetime.date.fromordinal(int(torch.randint(first, last + 1, (), generator=generator)))
    weekday, month, day, since = WEEKDAYS[date.weekday()], MONTHS[date.month - 1], ordinal(date.day), year(date.year)
    who, did, what = choose(SUBJECTS), choose(VERBS), choose(OBJECTS)
    # Not one, nor a number that ends in it: those would have to agree with what is counted.
    count = int(torch.randint(2, MOST_THINGS + 1, (), generator=generator))
    thousands, rest = divmod(count + (count % 100 == 1), 1000)
    many = [thousands, rest] if thousands else [rest]
    in_english = ["on", weekday[0], "the", *day[0], "of", month[0], *since[0], *who[0].split(), did[0]]
    in_german = ["am", weekday[1], "dem", *day[1], month[1], *since[1], *who[1].split()]
    return [*in_english, *english(many), what[0], "."], [*in_german, *german(many), what[1], did[1], "."]


def random_entries(most: int, generator: torch.Generator) -> tuple[list[str], list[str]]:
    """One to `most` entries, one after another."""
    count = int(torch.randint(1, most + 1, (), generator=generator))
    entries = [entry(generator) for _ in range(count)]
    return [word for one, _ in entries for word in one], [word for _, other in entries for word in other]
