"""Numbers as people read them."""

from __future__ import annotations

import pytest

from encore.units import bytes_text, seconds_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1024.00 KiB"),
        (1024**2, "1.00 MiB"),
        (2.5 * 1024**3, "2.50 GiB"),
        (1024**4, "1.00 TiB"),
        (3000 * 1024**4, "3000.00 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_bytes(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0123, "12.3 ms"), (1.0, "1.00 s"), (75.04, "75.04 s")])
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
