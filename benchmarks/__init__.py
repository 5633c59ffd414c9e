"""Eager PyTorch and Encore side by side: in one process, in turns, as ratios.

`python -m benchmarks SUITE` runs a suite, from the repository's root; the package `encore` imports nothing of it.
`compare` holds the measurement of one workload, `suite` runs them all, `table` shows them, `schema` says how they are
written as JSON, `results` writes them, `command` reads the arguments. Models and data live in `workloads/` alone, and
what decides or runs plans in the package.
"""

from benchmarks.compare import Comparison, Trainee, compare, in_turns
from benchmarks.suite import SUITE, Suite, run_suite
from encore.machine import Machine, this_machine

__all__ = ["SUITE", "Comparison", "Machine", "Suite", "Trainee", "compare", "in_turns", "run_suite", "this_machine"]
