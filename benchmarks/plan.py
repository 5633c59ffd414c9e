"""The suite `plan`: are budgets kept, what does keeping them cost, and how long does it take to plan?"""

from __future__ import annotations

import functools
import gc
from dataclasses import asdict, dataclass

import torch

from benchmarks.budgets import BudgetOutcome, sweep
from benchmarks.contest import SUITES
from benchmarks.planning import SIZES, PlanningTime, planning_time
from benchmarks.schema import Layout
from benchmarks.workloads import TINY_SIZES, build
from encore.machine import Machine, this_machine
from encore.terminal import progress

ROUNDS, QUICK_ROUNDS = 3, 1


LAYOUT = Layout("encore_bench_plan", 4)


@dataclass(frozen=True, slots=True)
class PlanSuite:
    """One run of the suite."""

    machine: Machine
    quick: bool
    rounds: int
    budgets: dict[str, tuple[BudgetOutcome, ...]]
    """By workload, from the smallest to the largest."""
    planning: tuple[PlanningTime, ...]
    """How long it takes to plan large graphs."""
    seconds: float = 0.0
    """What all of it took."""

    def to_json(self) -> str:
        """Everything as JSON; `encore_bench_plan` is the version of its layout."""
        return LAYOUT.to_json(asdict(self))


def run_plan(*, quick: bool = False) -> PlanSuite:
    """Measure everything, telling on stderr how far it is."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    budgets = {}
    for name, entry in SUITES["echo"].items():
        budgets[name] = sweep(name, TINY_SIZES[name] if quick else entry.sizes, rounds=rounds)
        torch.compiler.reset()
        gc.collect()
    planning = []
    with progress("planning", len(SIZES)) as tell:
        for name, sizes in SIZES.items():
            make = functools.partial(build, name, **(TINY_SIZES[name] if quick else sizes))
            planning.append(planning_time(make))
            tell(f"{name}: planned twice")
    return PlanSuite(this_machine(), quick, rounds, budgets, tuple(planning))
