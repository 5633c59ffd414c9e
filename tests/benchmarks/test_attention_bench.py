"""The figures of additive attention: what is saved, to the byte."""

from __future__ import annotations

import pytest

from benchmarks.attention import QUICK_SIZES, attention_rows


@pytest.mark.slow
def test_rows() -> None:
    rows = {row.name: row for row in attention_rows(quick=True)}
    assert list(rows) == list(QUICK_SIZES)
    row = rows["additive"]
    batch, queries, keys, hidden = row.sizes
    assert row.saved == 4 * (batch * (queries + keys) * hidden + hidden)
    middle = 4 * batch * queries * keys * hidden
    assert row.saved_eager >= middle
    assert rows["additive, LayerNorm"].saved_eager >= 2 * middle
    assert all(row.time_ratio > 0 and row.peak > 0 for row in rows.values())
