"""Numbers with units, parsed and formatted."""

from __future__ import annotations

import re
from typing import Any

from encore.errors import OptionError

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
MOST_BYTES = 2**63 - 1
"""More than any memory or disk has."""
MOST_COUNT = 2**31 - 1
SHOWN_LETTERS = 80


def bytes_text(size: int | float) -> str:
    """1536 -> '1.50 KiB'."""
    sign, amount = ("-", -float(size)) if size < 0 else ("", float(size))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{sign}{amount:.0f} {unit}" if unit == "B" else f"{sign}{amount:.2f} {unit}"
        amount /= 1024
    return f"{sign}{amount:.2f} TiB"


def seconds_text(seconds: float) -> str:
    """0.0123 -> '12.3 ms'."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def number_and_unit(text: str) -> tuple[float, str]:
    """`"1.5 GiB"` -> (1.5, "GIB"); the unit is "?" if there is no number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*|%)", text.strip())
    return (float(match.group(1)), match.group(2).upper()) if match else (0.0, "?")


def parse_bytes(given: Any, name: str) -> int:
    """Parse bytes as users write them: a whole number, or a text such as "16GiB"."""
    number: float = given if isinstance(given, int) and not isinstance(given, bool) else 0
    if isinstance(given, str):
        number, unit = number_and_unit(given)
        number *= UNITS.get(unit, 0)
    if not 1 <= number <= MOST_BYTES:
        raise OptionError(f"{name}={shown(given)} is not accepted; give a positive number of bytes, or '16GiB'")
    return int(number)


def shown(value: Any) -> str:
    """The repr of a value for a message, at most 80 letters long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a very large number"
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."


def check_count(given: Any, name: str) -> int:
    """Return a whole number of at least 1, or raise `OptionError`."""
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_COUNT:
        raise OptionError(f"{name}={shown(given)} is not accepted; give a whole number of at least 1")
    return given
