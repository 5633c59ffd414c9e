"""All workloads of the benchmark, one after another, with the machine they ran on."""

from __future__ import annotations

import functools
import gc
from dataclasses import asdict, dataclass

import torch

from benchmarks.compare import STAGES, Comparison, compare
from benchmarks.schema import Layout
from benchmarks.workloads import TINY_SIZES, build
from encore.machine import Machine, this_machine
from encore.terminal import progress

SUITE = ("nmt", "transformer", "resnet", "speech")
ROUNDS = 9
QUICK_ROUNDS = 7


LAYOUT = Layout("encore_bench", 3)


@dataclass(frozen=True, slots=True)
class Suite:
    """One run of the benchmark."""

    machine: Machine
    quick: bool
    """Tiny sizes: a check that everything works. Its times say little."""
    comparisons: tuple[Comparison, ...]
    seconds: float = 0.0
    """What all of it took."""

    def to_json(self) -> str:
        """Everything as JSON; `encore_bench` is the version of its layout."""
        return LAYOUT.to_json(asdict(self))


def run_suite(*, quick: bool = False) -> Suite:
    """Compare every workload of the suite, telling on stderr how far it is."""
    comparisons = []
    for name in SUITE:
        sizes = TINY_SIZES[name] if quick else {}
        with progress(f"{name:<11}", STAGES) as tell:
            comparisons.append(
                compare(functools.partial(build, name, **sizes), rounds=QUICK_ROUNDS if quick else ROUNDS, tell=tell)
            )
        torch.compiler.reset()  # the next workload starts without this one's graphs
        gc.collect()
    return Suite(this_machine(), quick, tuple(comparisons))
