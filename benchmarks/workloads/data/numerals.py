"""Numbers written out in English and in German, whose units come before the tens: "twenty one", "ein und zwanzig".

Numbers are given as groups of three digits, the most significant first. German compounds are written apart, so that a
word is a word of a small vocabulary.
"""

import torch

ENGLISH_SMALL, GERMAN_SMALL = zip(
    ("zero", "null"),
    ("one", "ein"),
    ("two", "zwei"),
    ("three", "drei"),
    ("four", "vier"),
    ("five", "fünf"),
    ("six", "sechs"),
    ("seven", "sieben"),
    ("eight", "acht"),
    ("nine", "neun"),
    ("ten", "zehn"),
    ("eleven", "elf"),
    ("twelve", "zwölf"),
    ("thirteen", "dreizehn"),
    ("fourteen", "vierzehn"),
    ("fifteen", "fünfzehn"),
    ("sixteen", "sechzehn"),
    ("seventeen", "siebzehn"),
    ("eighteen", "achtzehn"),
    ("nineteen", "neunzehn"),
    strict=True,
)
ENGLISH_TENS, GERMAN_TENS = zip(
    ("zero", "null"),
    ("ten", "zehn"),
    ("twenty", "zwanzig"),
    ("thirty", "dreißig"),
    ("forty", "vierzig"),
    ("fifty", "fünfzig"),
    ("sixty", "sechzig"),
    ("seventy", "siebzig"),
    ("eighty", "achtzig"),
    ("ninety", "neunzig"),
    strict=True,
)
ENGLISH_SCALES, GERMAN_SCALES, GERMAN_PLURALS = zip(
    ("", "", ""),
    ("thousand", "tausend", "tausend"),
    ("million", "Million", "Millionen"),
    ("billion", "Milliarde", "Milliarden"),
    ("trillion", "Billion", "Billionen"),
    ("quadrillion", "Billiarde", "Billiarden"),
    strict=True,
)

ENGLISH = [*ENGLISH_SMALL, *ENGLISH_TENS[2:], "hundred", *ENGLISH_SCALES[1:]]
GERMAN = [*GERMAN_SMALL, *GERMAN_TENS[2:], "eins", "eine", "und", "hundert"]
GERMAN += [*GERMAN_SCALES[1:], *GERMAN_PLURALS[2:]]

LONGEST_GROUP = 6
"""Words in "neun hundert neun und neunzig Millionen", the most that three digits ever take."""
MOST_GROUPS = len(ENGLISH_SCALES)


def english(groups: list[int]) -> list[str]:
    """A number in English words."""
    words: list[str] = []
    for value, power in zip(groups, reversed(range(len(groups))), strict=True):
        hundreds, rest = divmod(value, 100)
        words += [ENGLISH_SMALL[hundreds], "hundred"] if hundreds else []
        if rest >= 20:
            words += [ENGLISH_TENS[rest // 10]]
            rest %= 10
        words += [ENGLISH_SMALL[rest]] if rest else []
        words += [ENGLISH_SCALES[power]] if power and value else []
    return words


def german(groups: list[int]) -> list[str]:
    """A number in German words, with its compounds ("einundzwanzigtausend") written apart."""
    words: list[str] = []
    for value, power in zip(groups, reversed(range(len(groups))), strict=True):
        hundreds, rest = divmod(value, 100)
        words += [GERMAN_SMALL[hundreds], "hundert"] if hundreds else []
        if rest == 1:  # eins; ein tausend; eine Million
            words += ["eins" if power == 0 else "ein" if power == 1 else "eine"]
        elif rest >= 20:
            words += [GERMAN_SMALL[rest % 10], "und"] if rest % 10 else []
            words += [GERMAN_TENS[rest // 10]]
        elif rest:
            words += [GERMAN_SMALL[rest]]
        words += [(GERMAN_SCALES if value == 1 else GERMAN_PLURALS)[power]] if power and value else []
    return words


def random_number(most_groups: int, generator: torch.Generator) -> list[int]:
    """One to `most_groups` groups of three digits, the first not zero."""
    count = int(torch.randint(1, most_groups + 1, (), generator=generator))
    leading = int(torch.randint(1, 1000, (), generator=generator))
    return [leading, *torch.randint(1000, (count - 1,), generator=generator).tolist()]


def random_pair(most_groups: int, generator: torch.Generator) -> tuple[list[str], list[str]]:
    """A number in both languages."""
    number = random_number(most_groups, generator)
    return english(number), german(number)
