"""The suite `plan`: whether budgets are kept, the time that keeping them costs, and the time to plan."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass

import torch

from benchmarks.budgets import BudgetOutcome, sweep
from benchmarks.contest import SUITES
from benchmarks.planning import SIZES, PlanningTime, planning_time
from benchmarks.schema import Layout, Written
from benchmarks.workloads import TINY_SIZES, build
from encore.machine import Machine, this_machine
from encore.terminal import progress

ROUNDS, QUICK_ROUNDS = 3, 1


@dataclass(frozen=True, slots=True)
class PlanSuite(Written):
    """One run of the suite."""

    layout = Layout("encore_bench_plan", 4)

    machine: Machine
    quick: bool
    rounds: int
    budgets: dict[str, tuple[BudgetOutcome, ...]]
    """By workload, from the smallest to the largest."""
    planning: tuple[PlanningTime, ...]
    """How long it takes to plan large graphs."""
    seconds: float = 0.0
    """What all of it took."""


def run_plan(*, quick: bool = False) -> PlanSuite:
    """Measure everything, reporting progress on stderr."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    budgets = {}
    for name, entry in SUITES["echo"].items():
        budgets[name] = sweep(name, TINY_SIZES[name] if quick else entry.sizes, rounds=rounds)
        torch.compiler.reset()
        gc.collect()
    planning = []
    with progress("planning", len(SIZES)) as advance:
        for name, sizes in SIZES.items():
            make = functools.partial(build, name, **(TINY_SIZES[name] if quick else sizes))
            planning.append(planning_time(make))
            advance(f"{name}: planned twice")
    return PlanSuite(this_machine(), quick, rounds, budgets, tuple(planning))
