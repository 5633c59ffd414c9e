"""Kernels with symbols are compared with kernels of fixed size; the seconds are the machine's."""

from __future__ import annotations

from benchmarks.kernel_sizes import run_kernel_sizes, table


def test_every_length_is_compared() -> None:
    found = run_kernel_sizes(names=("LSTM gates",), later=(5, 7), rounds=1)
    assert [(one.name, one.length, one.compiled) for one in found] == [("LSTM gates", 5, 0), ("LSTM gates", 7, 0)]
    assert all(one.binding > 0 and one.times.ratio > 0 for one in found)
    assert len(table(found).splitlines()) == 4
