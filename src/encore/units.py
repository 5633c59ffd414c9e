"""Numbers as people read them."""

from __future__ import annotations


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
