"""Eager PyTorch and Encore side by side: in one process, in turns, as ratios.

`machine` says where, `compare` holds the measurement of one workload, `suite` runs them all, `table` shows them,
`schema` says how they are written as JSON, `results` writes them. What may not live here: models (`workloads/`) and
anything that decides or runs plans.
"""

from benchmarks.compare import Comparison, Trainee, compare, in_turns
from benchmarks.suite import SUITE, Suite, run_suite
from encore.machine import Machine, this_machine

__all__ = ["SUITE", "Comparison", "Machine", "Suite", "Trainee", "compare", "in_turns", "run_suite", "this_machine"]
