"""The suite `lengths`: training on batches of many lengths, each as long as its longest sentence.

Its parts are the workloads of `workloads/lengths.py` (`lengths_compared.py`), an epoch of a corpus (`lengths_epoch.py`)
and hundreds of shapes (`lengths_memory.py`). A part that fails is shown with its error and does not end the suite. What
is done is kept in a folder, if there is one, and is not run again by a suite that continues there.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.lengths_compared import LengthOutcome, compare_lengths
from benchmarks.lengths_epoch import QUICK, EpochOutcome, EpochSizes, run_epoch
from benchmarks.lengths_memory import QUICK_SHAPES, SHAPES, ShapeMemory, run_shapes
from benchmarks.schema import Layout, Written
from benchmarks.workloads.corpus import zipf_corpus
from benchmarks.workloads.lengths import LENGTH_WORKLOADS, build_lengths
from encore.machine import Machine, this_machine
from encore.terminal import Advance, progress
from encore.whole_files import write_whole

BATCHES, QUICK_BATCHES = 100, 8
LOOKED_AT, QUICK_LOOKED_AT = 5, 2
"""Lengths whose peak, gradients and time as a single shape are measured."""
PARTS = (*LENGTH_WORKLOADS, "epoch", "shapes")

Outcome = LengthOutcome | EpochOutcome | ShapeMemory


@dataclass(frozen=True, slots=True)
class LengthSuite(Written):
    """One run of the suite, or what is there of it."""

    layout = Layout("encore_bench_lengths", 2)

    machine: Machine
    quick: bool
    batches: int
    outcomes: dict[str, LengthOutcome]
    """By workload."""
    epoch: EpochOutcome | None = None
    shapes: ShapeMemory | None = None
    failures: dict[str, str] = field(default_factory=dict)
    """The errors of parts that failed."""
    seconds: float = 0.0
    """What all of it took."""

    def plus(self, part: str, found: Outcome) -> LengthSuite:
        """The suite with one part more."""
        if isinstance(found, LengthOutcome):
            return dataclasses.replace(self, outcomes={**self.outcomes, part: found})
        if isinstance(found, EpochOutcome):
            return dataclasses.replace(self, epoch=found)
        return dataclasses.replace(self, shapes=found)


def run_lengths(*, quick: bool = False, only: Collection[str] = (), parts: Path | None = None) -> LengthSuite:
    """Measure everything, or some parts, reporting progress on stderr. Parts that the folder `parts` has are read from
    there, and others are written to it as soon as they are done."""
    suite = LengthSuite(this_machine(), quick, QUICK_BATCHES if quick else BATCHES, {})
    for part in PARTS:
        if only and part not in only:
            continue
        known = None if parts is None else _read(parts, part, suite)
        if known is not None:
            print(f"{part:<8} read from {parts}", file=sys.stderr)
            suite = suite.plus(part, known)
            continue
        total, run = _work(part, quick=quick)
        try:
            with progress(f"{part:<8}", total) as advance:
                found = run(advance)
        except Exception as error:
            why = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"
            print(f"{part:<8} failed: {why}", file=sys.stderr)
            suite = dataclasses.replace(suite, failures={**suite.failures, part: why})
        else:
            suite = suite.plus(part, found)
            if parts is not None:
                _write(parts, part, suite, found)
        torch.compiler.reset()
        gc.collect()
    return suite


def _work(part: str, *, quick: bool) -> tuple[int, Callable[[Advance], Outcome]]:
    """How many pieces of work a part has, about, and what runs it."""
    if part == "epoch":
        sizes = QUICK if quick else EpochSizes()
        corpus = zipf_corpus(texts=sizes.texts, batch_size=sizes.batch_size, longest=sizes.longest)
        return 2 * len(corpus.batches), functools.partial(run_epoch, sizes)
    if part == "shapes":
        count = QUICK_SHAPES if quick else SHAPES
        return count, functools.partial(run_shapes, count)
    batches, looked_at = (QUICK_BATCHES, QUICK_LOOKED_AT) if quick else (BATCHES, LOOKED_AT)
    make = functools.partial(build_lengths, part)

    def compare(advance: Advance) -> LengthOutcome:
        return compare_lengths(make, batches=batches, looked_at=looked_at, advance=advance)

    return 3 * batches + 2 * looked_at, compare


def _head(suite: LengthSuite) -> dict[str, Any]:
    """What parts of one suite have in common."""
    machine = json.loads(json.dumps(dataclasses.asdict(suite.machine)))
    machine.pop("date", None)
    return {suite.layout.name: suite.layout.version, "quick": suite.quick, "machine": machine}


def _write(folder: Path, part: str, suite: LengthSuite, found: Outcome) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{part}.json", json.dumps({**_head(suite), part: dataclasses.asdict(found)}, indent=2) + "\n")


def _read(folder: Path, part: str, suite: LengthSuite) -> Outcome | None:
    """A part that was measured before, by the same code on the same machine."""
    path = folder / f"{part}.json"
    if not path.exists():
        return None
    told = json.loads(path.read_text())
    if {name: told.get(name) for name in _head(suite)} != _head(suite):
        print(f"{part:<8} in {folder} is of another machine, commit or size, and is measured again", file=sys.stderr)
        return None
    kind = {"epoch": EpochOutcome, "shapes": ShapeMemory}.get(part, LengthOutcome)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in told[part].items()}
    return kind(**values)  # type: ignore[no-any-return, operator]
