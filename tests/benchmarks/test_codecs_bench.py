"""The throughput of codecs is measured for each of them; the numbers themselves are the machine's."""

from __future__ import annotations

from benchmarks.codecs import BARS, run_codecs, table
from encore.codecs import CODECS


def test_every_kind_is_measured() -> None:
    found = run_codecs(elements=1 << 14, rounds=2)
    assert {one.kind for one in found} == {*BARS, "integers"}
    names = {one.name for one in found}
    assert {f"encode {name}" for name in CODECS if not name.startswith(("sparse_", "uint"))} <= names
    assert {"masked_by_bits", "pool 3x3 by 2", "pool 2x2 by 2, channels last, backward"} <= names
    assert all(one.seconds > 0 and one.against_copy > 0 and one.code_bytes > 0 for one in found)
    text = table(found)
    assert len(text.splitlines()) == len(found) + 1
