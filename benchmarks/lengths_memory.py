"""Hundreds of shapes of one model: what the process takes while they come, and after the model is gone."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import encore
from benchmarks.lengths_compared import empty_caches
from benchmarks.workloads.lengths import build_lengths
from encore.api import compiled_call
from encore.errors import OptionError

SHAPES, QUICK_SHAPES = 300, 24
POINTS = 12
"""Times at which the memory of the process is read."""


@dataclass(frozen=True, slots=True)
class ShapeMemory:
    """Resident memory of the process, in bytes."""

    shapes: int
    """Distinct shapes that were trained on."""
    kept: int
    """Graphs that are kept at the end."""
    before: int
    """Before the first shape."""
    resident: tuple[int, ...]
    """After each twelfth of the shapes."""
    after: int
    """When the model is gone."""

    @property
    def growth(self) -> float:
        """How much the process has grown over the last half of the shapes, as a fraction."""
        return self.resident[-1] / self.resident[len(self.resident) // 2 - 1] - 1


def run_shapes(shapes: int, advance: Callable[[str], None] = lambda note: None) -> ShapeMemory:
    """Train a small tagger on as many shapes, each once, in both dimensions."""
    readings = []
    with empty_caches():
        workload = build_lengths("tagger", batch_size=4, hidden=16, layers=1)
        before = resident_bytes()
        encore.compile(workload.model)
        for number, (rows, length) in enumerate(_shapes(shapes), 1):
            words, tags = workload.batch(length)
            workload.forward(workload.model, words[:rows], tags[:rows]).backward()
            workload.model.zero_grad()
            if number * POINTS // shapes > (number - 1) * POINTS // shapes:
                readings.append(resident_bytes())
            advance(f"{rows} rows of {length}")
        kept = len(compiled_call(workload.model).session.graphs)
        del workload
    return ShapeMemory(shapes, kept, before, tuple(readings), resident_bytes())


def _shapes(count: int) -> Iterator[tuple[int, int]]:
    for number in range(count):
        yield 2 + number % 3, 10 + number // 3


def resident_bytes() -> int:
    """Bytes of this process that are in memory, after all garbage is collected and free memory is returned."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        raise OptionError("the memory of a process is read from /proc, which is not here; run this part on Linux")
    for _ in range(3):
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
